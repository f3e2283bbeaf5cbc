"""Compiled kernels compute the same as torch's operations: Numba's kernels, and Triton's GPU kernels, here under
Triton's interpreter."""

from __future__ import annotations

import importlib
import math
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from compiled_kernels import output_of
from tiny_loki import encoder_of
from torch import Tensor

from fourfold.errors import UserError
from fourfold.inference.loki import LokiConfig
from fourfold.inference.loki import settings as config_module
from fourfold.inference.loki.attend import decode
from fourfold.inference.loki.codes import decoded
from fourfold.inference.loki.select import DecodeStep, combine_heads, keys_per_sequence

DEVICES = {"triton": "cuda" if torch.cuda.is_available() else "cpu", "numba": "cpu"}


ON_A_GPU = [pytest.mark.gpu] if DEVICES["triton"] == "cuda" else []


@pytest.fixture(params=[pytest.param("triton", marks=ON_A_GPU), "numba"])
def kernels(request: pytest.FixtureRequest) -> str:
    pytest.importorskip(request.param)
    return request.param


def step(
    kernels: str,
    config: LokiConfig,
    length: int,
    *,
    batch: int = 1,
    group: int = 4,
    width: int = 32,
    d: int = 16,
    dtype: torch.dtype = torch.float32,
    visible: Tensor | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Return the output of one step from the kernels and from torch's operations. The cache has unused room after each
    head's rows, and each head has a sink."""
    generator = torch.Generator().manual_seed(length)
    heads = 2
    room = torch.randn(batch, heads, length + 13, width, generator=generator)
    key, value = (scale * room)[:, :, :length].to(dtype), room.flip(2)[:, :, :length].to(dtype)
    query = torch.randn(batch, heads * group, width, generator=generator).to(dtype)
    basis = torch.linalg.qr(torch.randn(heads, width, width, generator=generator)).Q[..., :d]
    encoder = encoder_of(basis)
    k_B = None
    k = config.key_count(length)
    if visible is not None:
        k, k_B = config.largest_key_count(length), keys_per_sequence(visible[:, 0].sum(-1), config)
    seen = value.float() if visible is None else value.float().masked_fill(~visible[..., None], 0.0)
    tensors = [t.to(DEVICES[kernels]) for t in (query, key, value, seen.sum(2), encoder.encode(key))]
    sinks = torch.randn(heads * group, generator=generator)
    rest = [None if t is None else t.to(DEVICES[kernels]) for t in (encoder, visible, k_B, sinks)]
    with torch.no_grad():
        return tuple(
            decode(*tensors, rest[0], k, config.model_copy(update={"kernels": name}), width**-0.5, *rest[1:])
            for name in (kernels, "torch")
        )


def left_padded(batch: int, length: int) -> Tensor:
    """Return a mask under which the sequences see all tokens, the last half, the last third, …"""
    begins = torch.tensor([length - length // (row + 1) for row in range(batch)])
    return (torch.arange(length) >= begins[:, None])[:, None]


@pytest.mark.fast_cases(8)
@pytest.mark.parametrize(
    ("length", "k", "group", "width", "d"),
    [
        (300, 40, 4, 32, 12),
        (1024 + 117, 200, 8, 64, 16),  # long enough for three splits
        (700, 1, 1, 24, 24),  # a width that is not a power of two, and a single key
        (700, 699, 4, 16, 7),  # the last byte of codes is not full
    ],
)
def test_kernels_compute_what_torch_does(kernels: str, length: int, k: int, group: int, width: int, d: int) -> None:
    ours, torchs = step(kernels, LokiConfig(k=k, min_seq=0), length, group=group, width=width, d=d)
    torch.testing.assert_close(ours, torchs, rtol=1e-5, atol=1e-5)


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("group", [1, 4, 7, 8])
@pytest.mark.parametrize("width", [pytest.param(width, marks=ON_A_GPU) for width in (64, 80, 96, 128, 256)])
def test_awkward_sizes(width: int, group: int) -> None:
    """Sizes are real head widths and odd lengths, with padding on the left and a row that sees nothing."""
    pytest.importorskip("triton")
    length = 259 + 2 * group
    visible = left_padded(3, length)
    visible[1] = False
    options = {"group": group, "width": width, "d": width // 4, "scale": 0.5}
    ours, torchs = step("triton", LokiConfig(k=37, min_seq=0), length, batch=3, visible=visible, **options)
    torch.testing.assert_close(ours, torchs, rtol=1e-5, atol=1e-5)
    assert not ours[1].any()


def test_more_parts_than_are_merged_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With long contexts, the parts of a head do not all fit into registers."""
    triton_attend = pytest.importorskip("fourfold.inference.loki.triton_attend")
    for name in ("CHOSEN_SPLIT", "CHOSEN_BLOCK"):
        monkeypatch.setattr(triton_attend, name, 16)
    k = 16 * triton_attend.MERGED_BLOCK + 50
    # In the second case, the last splits hold no visible key.
    for visible in (None, left_padded(2, k + 100)[1:]):
        ours, torchs = step("triton", LokiConfig(k=k, min_seq=0), k + 100, group=1, width=16, d=16, visible=visible)
        torch.testing.assert_close(ours, torchs, rtol=1e-5, atol=1e-5)


def test_splits_of_a_row_stay_few() -> None:
    """Each GPU program stores the sums of all splits, so the number of splits must stay small."""
    triton_kernels = pytest.importorskip("fourfold.inference.loki.triton_kernels")
    for length, rows in ((1, 1), (8192, 8), (131072, 64), (1 << 20, 8), (1 << 24, 8), ((1 << 24) + 1, 1)):
        split = triton_kernels.split_of(length, rows)
        assert math.ceil(length / split) <= triton_kernels.MOST_SPLITS and split & (split - 1) == 0
        assert split <= triton_kernels.MOST_SPLIT or length > triton_kernels.MOST_SPLIT * triton_kernels.MOST_SPLITS


@pytest.mark.parametrize("dtype", [pytest.param(torch.bfloat16, marks=pytest.mark.slow), torch.float16])
def test_half_precision(kernels: str, dtype: torch.dtype) -> None:
    """Scores in float32 and scores rounded to 16 bits may rank keys differently. This does not matter here, because
    nearly all keys are chosen."""
    if kernels == "numba" and dtype == torch.float16:
        pytest.skip("Numba does not compute with float16")
    if kernels == "triton" and DEVICES["triton"] == "cpu" and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter multiplies the bits of bfloat16 as integers")
    ours, torchs = step(kernels, LokiConfig(k=511, min_seq=0), 512, dtype=dtype)
    assert ours.dtype == dtype
    torch.testing.assert_close(ours.float(), torchs.float(), rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("ends", [{}, {"sink": 4, "recent": 9}])
def test_padding_and_ends(kernels: str, ends: dict[str, int]) -> None:
    visible = left_padded(3, 400)
    visible[2] = False  # a row that sees no key gives zeros
    config = LokiConfig(k_f=0.25, min_k=16, min_seq=0, **ends)
    ours, torchs = step(kernels, config, 400, batch=3, visible=visible)
    torch.testing.assert_close(ours, torchs, rtol=1e-5, atol=1e-5)
    assert not ours[2].any()
    ours, torchs = step(kernels, LokiConfig(k=50, min_seq=0, **ends), 400)
    torch.testing.assert_close(ours, torchs, rtol=1e-5, atol=1e-5)


def test_extreme_scores(kernels: str) -> None:
    """Nearly every softmax weight is zero, so most keys tie."""
    ours, _ = step(kernels, LokiConfig(k=64, min_seq=0), 900, scale=300.0)
    assert ours.isfinite().all()


def test_ties_go_to_the_left(kernels: str) -> None:
    kernel = importlib.import_module(f"fourfold.inference.loki.{kernels}_kernels").decode
    device = DEVICES[kernels]
    value = torch.arange(600.0).view(1, 1, 600, 1).expand(1, 1, 600, 16).contiguous().to(device)
    same = torch.ones(1, 1, 600, 16, device=device)
    codes = torch.ones(1, 1, 600, 4, dtype=torch.uint8, device=device)
    query = torch.ones(1, 1, 2, 16, device=device)
    config = LokiConfig(k=5, min_seq=0, recent=0)
    out, _ = kernel(DecodeStep(query, query, same, value, value.sum(2), codes, 5, config, 0.25))
    # All keys get the same attention. The mean of the values 0 to 4 is 2, and the mean of the values 5 to 599 is 302.
    torch.testing.assert_close(out, torch.full_like(out, 2.0 * 5 / 600 + 302.0 * 595 / 600))


def test_a_model_generates_by_kernels(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from tiny_loki import loki_model, windows

    from fourfold.inference.loki import calibrate, enable_loki

    model = loki_model("llama")
    basis = calibrate(model, windows())
    prompt, texts = torch.tensor(windows(1, 40)).to(DEVICES[kernels]), []
    model.to(DEVICES[kernels])
    for name in (kernels, "torch"):
        enable_loki(model, basis, LokiConfig(k=12, d=4, min_seq=0, sink=1, kernels=name))
        texts.append(model.generate(prompt, max_new_tokens=6, do_sample=False))
    assert torch.equal(*texts)
    if kernels == "triton" and DEVICES["triton"] == "cpu":
        monkeypatch.delenv("TRITON_INTERPRET")
        with pytest.raises(UserError, match="needs a GPU"):
            enable_loki(model, basis, LokiConfig(kernels="triton"))


COLLECT = """
import pytest, sys
pytest.main(["--collect-only", "-q", sys.argv[1]])
import triton.language
sys.exit(type(triton.language.zeros).__name__)
"""


def test_triton_interprets_its_own_functions_whatever_tests_come_first() -> None:
    """Their conftest.py imports Triton before most hooks run. Kernels cannot call functions that are not
    interpreted."""
    pytest.importorskip("triton")
    tests = Path(__file__).parent.parent
    hidden = {name: value for name, value in os.environ.items() if not name.startswith(("TRITON_", "CUDA_", "PYTEST_"))}
    command = [sys.executable, "-c", COLLECT, str(tests / "training" / "test_flops.py")]
    result = subprocess.run(command, cwd=tests.parent, env=hidden, capture_output=True, text=True)
    assert result.stderr.splitlines()[-1] == "InterpretedFunction", result.stdout + result.stderr


def test_only_chosen_keys_are_read(kernels: str) -> None:
    """Keys and values that are not chosen may be NaN. A NaN that is chosen must show in the output."""
    config = LokiConfig(k=20, sink=0, recent=0, min_seq=0, kernels=kernels)
    generator = torch.Generator().manual_seed(0)
    key, value = torch.randn(2, 1, 1, 500, 16, generator=generator)
    query, encoder = torch.randn(1, 2, 16, generator=generator), encoder_of(torch.eye(16)[None, :, :8])
    codes = encoder.encode(key)
    worth = combine_heads(torch.matmul(encoder.project_queries(query[None]) * 0.25, decoded(codes, query.dtype).mT))
    chosen = worth[0, 0].topk(20).indices
    others = torch.ones(500, dtype=torch.bool).index_fill(0, chosen, False)
    tensors = [t.to(DEVICES[kernels]) for t in (query, key, value, value.sum(2), codes, encoder)]
    with torch.no_grad():
        expected = decode(*tensors, 20, config, 0.25)
        for tensor in tensors[1:3]:
            tensor[:, :, others] = math.nan
        torch.testing.assert_close(decode(*tensors, 20, config, 0.25), expected, rtol=0, atol=0)
        for tensor in tensors[1:3]:
            tensor[:, :, chosen[7]] = math.nan
        assert decode(*tensors, 20, config, 0.25).isnan().all()


def test_numba_in_other_threads_and_numbers_of_them() -> None:
    """Calls from several threads do not disturb each other, and torch keeps its number of threads."""
    pytest.importorskip("numba")
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            with ThreadPoolExecutor(4) as pool:
                for ours, torchs in pool.map(
                    lambda length: step("numba", LokiConfig(k=50, min_seq=0), length, batch=3), range(300, 340)
                ):
                    torch.testing.assert_close(ours, torchs, rtol=1e-5, atol=1e-5)
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_numba_runs_only_with_supported_devices_and_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    cpu, auto = torch.device("cpu"), LokiConfig()
    assert [auto.kernels_for(cpu, dtype) for dtype in (torch.float32, torch.float64)] == ["numba", "torch"]
    with pytest.raises(UserError, match="float32 and bfloat16 on a CPU, not float16 on cpu"):
        LokiConfig(kernels="numba").kernels_for(cpu, torch.float16)
    assert auto.kernels_for(cpu, torch.float32, torch.float16) == "torch"
    monkeypatch.setattr(
        config_module, "why_unavailable", lambda package: "is not installed: pip install 'fourfold[loki]'"
    )
    assert auto.kernels_for(cpu, torch.float32) == "torch"
    with pytest.raises(UserError, match=r"needs numba, which is not installed: pip install 'fourfold\[loki\]'"):
        LokiConfig(kernels="numba").kernels_for(cpu, torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environment", "kernels"),
    [
        pytest.param({"NUMBA_CACHE_DIR": "TMP"}, "numba", id="full disk"),
        pytest.param({"NUMBA_DISABLE_JIT": "1"}, "torch", id="disabled"),
    ],
)
def test_numba_that_cannot_keep_what_it_compiles_or_is_disabled(
    tmp_path: Path, environment: dict[str, str], kernels: str
) -> None:
    """If the disk is full, each process compiles again. With NUMBA_DISABLE_JIT, torch's operations run. Every step
    still works."""
    pytest.importorskip("numba")
    code = (
        "import torch, resource\n"
        "from fourfold.inference.loki import LokiConfig\n"
        "from fourfold.inference.loki.attend import decode\n"
        "from fourfold.inference.loki.codes import Encoder\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "q, k = torch.randn(1, 2, 8), torch.randn(1, 2, 100, 8)\n"
        "eye = torch.eye(8).repeat(2, 1, 1)\n"
        "encoder = Encoder.of(eye, eye, torch.zeros(2, 8), eye)\n"
        "with torch.no_grad():\n"
        "    out = decode(q, k, k, k.sum(2), encoder.encode(k), encoder, 9, LokiConfig(k=9), 1.0)\n"
        "    print(out.isfinite().all().item())\n"
        "    print(LokiConfig().kernels_for(q.device, q.dtype))\n"
    )
    variables = {name: value.replace("TMP", str(tmp_path)) for name, value in environment.items()}
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | variables, capture_output=True, text=True)
    assert done.stdout.split() == ["True", kernels], done.stderr[-2000:]


@pytest.mark.slow
def test_kernels_compile_for_a_gpu() -> None:
    """Without a GPU, compile to machine code for an H100 and an MI300, with the dtypes and sizes of real models."""
    printed = output_of(Path(__file__).with_name("compile_loki_kernels.py"))
    assert printed.count(" 90 32 ") == printed.count(" gfx942 64 ") == 7 * 4
