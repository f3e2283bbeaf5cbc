"""LoRA adapters of peft in the user's own training loop: their updates are the updates of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from safetensors.torch import load_file
from test_parallelized_packing import LABELS, POSITIONS, TOKENS, make
from torch import Tensor, nn

import fourfold
from fourfold.errors import UserError
from fourfold.parallel.grid.grid import Grid

transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PACKED = {"position_ids": POSITIONS, "labels": LABELS}


def adapted(dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """Return a model with adapters. Neither A nor B is zero, so both have gradients."""
    base = make().to(dtype)
    torch.manual_seed(1)
    options = {"r": 4, "lora_alpha": 6, "target_modules": ALL, "init_lora_weights": False} | options
    return peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **options))


def step_body(
    rank: int, world_size: int, grid: dict[str, int], dtype: torch.dtype, folder: Path
) -> tuple[float, float, bool]:
    model = fourfold.parallelize(adapted(dtype), Grid(fourfold.ParallelConfig(**grid), "cpu"))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=1.0)
    frozen = {shard.name: shard.local.clone() for shard in model.shards if not shard.parameter.requires_grad}
    batch = {key: model.rows(each) for key, each in PACKED.items()}
    loss = model(model.rows(TOKENS), **batch).loss
    model.backward(loss)
    norm = model.clip_grad_norm_(1e9)
    optimizer.step()
    optimizer.zero_grad()
    model.save_pretrained(folder)
    unchanged = all(torch.equal(shard.local, frozen.get(shard.name, shard.local)) for shard in model.shards)
    return loss.item(), norm.item(), unchanged and len(trained) == 2 * 2 * len(ALL) and len(frozen) > len(ALL)


def files_of(model: Any) -> dict[str, Tensor]:
    """Return the adapters under the names that they have in peft's files."""
    state: dict[str, Tensor] = peft.get_peft_model_state_dict(model)
    return {name: tensor.detach().clone() for name, tensor in state.items()}


@pytest.mark.parametrize(
    ("grid", "dtype"),
    [
        ({"x": 2, "z": 2}, torch.float32),
        ({"x": 2, "y": 2}, torch.float32),
        pytest.param({"y": 2, "dp": 2, "zero": 1}, torch.float32, marks=pytest.mark.slow),
        pytest.param({"x": 2, "dp": 2}, torch.float32, marks=pytest.mark.slow),
        pytest.param({"x": 2, "z": 2}, torch.bfloat16, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_adapters_on_a_grid_are_updated_as_on_one_process(
    pool: Pool, tmp_path: Path, grid: dict[str, int], dtype: torch.dtype
) -> None:
    """With packed documents. The model's two key-value heads cannot be split over x = 4, but over x = 2 and y = 2."""
    model, near = adapted(dtype), 1e-5 if dtype == torch.float32 else 0.1
    before = files_of(model)
    loss = model(TOKENS, use_cache=False, **PACKED).loss
    loss.backward()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    norm = nn.utils.clip_grad_norm_(trained, 1e9)
    torch.optim.SGD(trained, lr=1.0).step()
    after = files_of(model)
    for found in pool.run(4, step_body, grid, dtype, tmp_path / "adapter"):
        assert found == (pytest.approx(loss.item(), rel=near), pytest.approx(norm.item(), rel=near), True)
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert saved.keys() == after.keys()
    for name, weight in saved.items():
        assert weight.dtype == torch.float32
        assert (weight - after[name]).norm() < near * (after[name] - before[name]).norm(), name
    opened = peft.PeftModel.from_pretrained(make().to(dtype), tmp_path / "adapter")
    expected = model(TOKENS).logits
    assert (opened(TOKENS).logits - expected).norm() < 100 * near * expected.norm()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "dropout": ({"lora_dropout": 0.1}, r"model\.layers\.0\.self_attn\.q_proj: .* has lora_dropout"),
    "dora": ({"use_dora": True}, "has a variant of LoRA, such as DoRA"),
    "bias": ({"lora_bias": True}, "has lora_bias"),
    "embedding": ({"target_modules": ["embed_tokens"]}, "adapts a Embedding"),
    "more weights": ({"modules_to_save": ["lm_head"]}, r"peft also trains .*lm_head.*modules_to_save"),
}


def refused_body(rank: int, world_size: int, folder: Path) -> None:
    grid = Grid(fourfold.ParallelConfig(x=2), "cpu")
    for options, sentence in REFUSED.values():
        with pytest.raises(UserError, match=sentence):
            fourfold.parallelize(adapted(**options), grid)
    several = adapted()
    several.add_adapter("second", peft.LoraConfig(r=2, target_modules=ALL))
    with pytest.raises(UserError, match=r"several adapters of peft \(default, second\)"):
        fourfold.parallelize(several, grid)
    prompted = peft.get_peft_model(make(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    with pytest.raises(UserError, match="trains LoRA adapters only"):
        fourfold.parallelize(prompted, grid)
    with pytest.raises(UserError, match="has no weights of the adapters"):
        fourfold.parallelize(adapted(), grid, weights=folder)
    with pytest.raises(UserError, match="leave precision out"):
        fourfold.parallelize(adapted(torch.bfloat16), grid, precision="fp32")


def test_adapters_that_the_grid_cannot_split_are_refused(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, refused_body, tmp_path)
