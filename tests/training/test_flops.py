"""The FLOP formula agrees with counting by hand and with PyTorch's counter. This file also tests the table of peak
rates."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from fourfold.config.model import ModelConfig
from fourfold.planning.machines.machine import load_machine
from fourfold.training.flops import FlopCount, flops_per_token, mfu, peak_flops

TINY = {
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 3,
    "intermediate_size": 16,
    "mlp": "swiglu",
    "position_embedding": "learned",  # because rotary embeddings do not allow head_dim = 3
    "vocab_size": 32,
    "pad_vocab_size_to_multiple_of": 1,
}


def count_of(seq_length: int = 10, **changes: Any) -> FlopCount:
    return flops_per_token(ModelConfig.model_validate(TINY | changes), seq_length)


def test_a_tiny_decoder_by_hand():
    # Weights of a layer: q 8*12, k and v 8*6 each, output 12*8, and three MLP matrices of 8*16. The head has 8*32.
    layer = 96 + 48 + 48 + 96 + 3 * 128
    assert layer == 672
    matmul_parameters = 2 * 672 + 256
    attention = 2 * (4 * 10 * 4 * 3 // 2)  # 240 FLOPs per token in each of two layers
    count = count_of()
    assert count.matmul_parameters == matmul_parameters == 1600
    assert count.forward == 2 * 1600 + attention == 3680
    assert count.training == 11040


def test_an_mlp_without_gate_has_two_matrices():
    gated, plain = count_of(), count_of(mlp="gelu")
    assert gated.matmul_parameters - plain.matmul_parameters == 2 * 8 * 16


def test_agrees_with_palm_up_to_the_causal_half():
    """PaLM's appendix B has 6N + 12 L H Q T per token. Our formula counts half of the second term."""
    count = count_of()
    palm = 6 * count.matmul_parameters + 12 * 2 * 4 * 3 * 10
    assert palm - count.training == 6 * 2 * 4 * 3 * 10


def test_padded_rows_of_the_head_are_multiplied_too():
    assert count_of(vocab_size=25, pad_vocab_size_to_multiple_of=32) == count_of()


def test_a_sliding_layer_counts_the_keys_in_its_window():
    """One of two layers sees at most 8 of 64 keys."""
    full = count_of(64)
    slid = count_of(64, sliding_window=8, layer_types=["sliding_attention", "full_attention"])
    seen = sum(min(query + 0.5, 8) for query in range(64)) / 64  # the key of the query's own token counts half
    assert full.forward - slid.forward == pytest.approx(4 * 4 * 3 * (64 / 2 - seen), rel=0.01)


def test_linear_attention_by_hand():
    """One of two layers has 2 key heads of width 3, and 4 value heads of width 5."""
    sizes = {"num_key_heads": 2, "num_value_heads": 4, "key_head_dim": 3, "value_head_dim": 5}
    linear = {f"linear_{key}": value for key, value in sizes.items()}
    count = count_of(layer_types=["linear_attention", "full_attention"], **linear)
    # Weights of linear attention: q and k 8*6 each, v and z 8*20 each, b and a 8*4 each, output 20*8.
    attention = 48 + 48 + 160 + 160 + 32 + 32 + 160
    assert attention == 640
    mlp, full, head = 3 * 128, 96 + 48 + 48 + 96, 256
    assert count.matmul_parameters == attention + full + 2 * mlp + head == 1952
    # There are 4 states of 3*5 entries. A token reads from them, updates them, and reads its output. Each of these
    # takes 2 FLOPs per entry.
    states = 3 * 2 * 4 * 3 * 5
    assert count.forward == 2 * 1952 + states + 240


def test_a_gate_of_the_outputs_is_one_more_projection():
    assert count_of(attention_output_gate=True).matmul_parameters - count_of().matmul_parameters == 2 * 8 * 12


@pytest.mark.parametrize("gated", [True, False])
def test_linear_layers_agree_with_the_flop_counter(gated):
    """Compare the matmuls, forward and backward, when the linear layers of the tiny decoder run one after another."""
    tokens, hidden, heads_width, kv_width, inner, vocab = 5, 8, 12, 6, 16, 32
    shapes = [(hidden, heads_width), (hidden, kv_width), (hidden, kv_width), (heads_width, hidden)]
    shapes += [(hidden, inner)] * (2 if gated else 1) + [(inner, hidden)]
    shapes = shapes * 2 + [(hidden, vocab)]
    layers = [nn.Linear(rows, columns, bias=False) for rows, columns in shapes]
    inputs = [torch.randn(tokens, rows, requires_grad=True) for rows, _ in shapes]

    with FlopCounterMode(display=False) as forward:
        outputs = [layer(x) for layer, x in zip(layers, inputs, strict=True)]
    with FlopCounterMode(display=False) as backward:
        sum(output.sum() for output in outputs).backward()

    count = count_of(0, mlp="swiglu" if gated else "gelu")
    assert forward.get_total_flops() == tokens * count.forward
    assert forward.get_total_flops() + backward.get_total_flops() == tokens * count.training


def test_attention_is_half_of_what_the_flop_counter_sees_without_a_mask():
    seq, heads, head_dim = 10, 4, 3
    q, k, v = (torch.randn(heads, seq, head_dim) for _ in range(3))
    with FlopCounterMode(display=False) as counter:
        (q @ k.mT).softmax(-1) @ v
    without_attention = count_of(0)
    attention_per_layer = (count_of().forward - without_attention.forward) // 2
    assert counter.get_total_flops() == 2 * seq * attention_per_layer


@pytest.mark.parametrize(
    ("name", "flops"),
    [
        ("NVIDIA A100-SXM4-40GB", 312e12),
        ("NVIDIA A100 80GB PCIe", 312e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA B200", 2.25e15),
        ("AMD Instinct MI250X", 191.5e12),
        ("AMD Instinct MI300X", 1307e12),
    ],
)
def test_peaks_of_known_devices(name, flops):
    for precision in ("bf16", "fp16"):
        assert peak_flops(name, precision).flops == flops
    assert peak_flops(name, "fp32").flops < flops / 3
    assert "TFLOP/s dense bf16" in peak_flops(name, "bf16").source


@pytest.mark.parametrize(
    "name", ["", "cpu", "Intel(R) Xeon(R)", "NVIDIA H20", "NVIDIA H800", "NVIDIA GB200", "NVIDIA H200 MIG 1g.18gb"]
)
def test_an_unknown_device_has_no_peak(name):
    assert peak_flops(name, "bf16") is None


def test_float8_counts_against_the_peak_of_the_plan():
    peak = peak_flops("NVIDIA H200", "bf16", float8=True)
    assert peak.flops == load_machine("h200", "--machine").peak
    assert "989 TFLOP/s dense bf16, also for the float8 matmuls (" in peak.source


def test_the_peak_of_fp32_is_not_the_peak_of_tf32():
    assert peak_flops("NVIDIA A100-SXM4-40GB", "fp32").flops == 19.5e12
    assert peak_flops("AMD Instinct MI250X", "fp32").flops == 47.85e12


def test_mfu_is_a_fraction_and_is_not_invented():
    assert mfu(375.0, peak_flops("NVIDIA H200", "bf16")) == pytest.approx(375 / 989)
    assert mfu(375.0, None) is None
