"""The Triton kernels compute what torch's operations do (here under Triton's interpreter), and compile for a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from fourfold.errors import UserError
from fourfold.inference.loki import LokiConfig
from fourfold.inference.loki.attend import decode, project
from fourfold.inference.loki.select import keys_of_each

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def step(
    config: LokiConfig,
    length: int,
    *,
    batch: int = 1,
    group: int = 4,
    width: int = 32,
    d: int = 8,
    dtype: torch.dtype = torch.float32,
    visible: Tensor | None = None,
    rotated: bool = False,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """One step by the kernels, and by torch's operations; the cache has room to grow behind each head's rows."""
    generator = torch.Generator().manual_seed(length)
    heads = 2
    room = torch.randn(batch, heads, length + 13, width, generator=generator)
    key, value = (scale * room)[:, :, :length].to(dtype), room.flip(2)[:, :, :length].to(dtype)
    query = torch.randn(batch, heads * group, width, generator=generator).to(dtype)
    basis = torch.linalg.qr(torch.randn(heads, width, width, generator=generator)).Q[..., :d]
    proxy = key[..., :d] if rotated else project(key, basis)
    k_B = None
    k = config.keys_of(length)
    if visible is not None:
        k, k_B = config.most_keys_of(length), keys_of_each(visible[:, 0].sum(-1), config)
    tensors = [t.to(DEVICE) for t in (query, key, value, proxy)]
    rest = [None if t is None else t.to(DEVICE) for t in (None if rotated else basis, visible, k_B)]
    with torch.no_grad():
        return tuple(
            decode(*tensors, rest[0], k, config.but(kernels=kernels), width**-0.5, rest[1], rest[2])
            for kernels in ("triton", "torch")
        )


def left_padded(batch: int, length: int) -> Tensor:
    """Rows that see the last length, half and third of the tokens, …"""
    begins = torch.tensor([length - length // (row + 1) for row in range(batch)])
    return (torch.arange(length) >= begins[:, None])[:, None]


@pytest.mark.parametrize("reduce", ["softmax", "max", "mean"])
@pytest.mark.parametrize(
    ("length", "k", "group", "width", "d"),
    [
        (300, 40, 4, 32, 8),
        (4096 + 517, 200, 8, 64, 16),  # two splits
        (700, 1, 1, 24, 24),  # a width that is no power of two, one key
        (700, 699, 4, 16, 3),
    ],
)
def test_kernels_compute_what_torch_does(reduce: str, length: int, k: int, group: int, width: int, d: int) -> None:
    config = LokiConfig(k=k, group_reduce=reduce, min_seq=0)
    ours, torchs = step(config, length, group=group, width=width, d=d)
    torch.testing.assert_close(ours, torchs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    """Ranks in float32 may prefer another key than ranks rounded to 16 bits; nearly all keys are the same set."""
    if DEVICE == "cpu" and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter multiplies the bits of bfloat16 as integers")
    ours, torchs = step(LokiConfig(k=511, min_seq=0), 512, dtype=dtype)
    assert ours.dtype == dtype
    torch.testing.assert_close(ours.float(), torchs.float(), rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("ends", [{}, {"sink": 4, "recent": 9}])
def test_padding_and_ends(ends: dict[str, int]) -> None:
    visible = left_padded(3, 400)
    visible[2] = False  # a row that sees nothing gives zeros
    config = LokiConfig(k_f=0.25, min_k=16, min_seq=0, **ends)
    ours, torchs = step(config, 400, batch=3, visible=visible)
    torch.testing.assert_close(ours, torchs, rtol=1e-5, atol=1e-5)
    assert not ours[2].any()
    ours, torchs = step(LokiConfig(k=50, min_seq=0, **ends), 400)
    torch.testing.assert_close(ours, torchs, rtol=1e-5, atol=1e-5)


def test_rotated_cache_and_extreme_scores() -> None:
    """A proxy that is part of each key's row; softmaxes in which nearly every weight is zero, so that most keys tie."""
    ours, torchs = step(LokiConfig(k=64, min_seq=0), 900, rotated=True)
    torch.testing.assert_close(ours, torchs, rtol=1e-5, atol=1e-5)
    ours, _ = step(LokiConfig(k=64, min_seq=0), 900, scale=300.0)
    assert ours.isfinite().all()


def test_ties_go_to_the_left() -> None:
    from fourfold.inference.loki.kernels import decode as kernel

    value = torch.arange(600.0).view(1, 1, 600, 1).expand(1, 1, 600, 16).contiguous().to(DEVICE)
    same = torch.ones(1, 1, 600, 16, device=DEVICE)
    query = torch.ones(1, 1, 2, 16, device=DEVICE)
    out = kernel(query, query, same, value, same, 5, LokiConfig(k=5, min_seq=0), 0.25, None, None)
    torch.testing.assert_close(out, torch.full_like(out, 2.0))


def test_a_model_generates_by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    from tiny_loki import loki_model, windows

    from fourfold.inference.loki import calibrate, enable_loki

    model = loki_model("llama")
    basis = calibrate(model, windows())
    prompt, texts = torch.tensor(windows(1, 40)).to(DEVICE), []
    model.to(DEVICE)
    for kernels in ("triton", "torch"):
        enable_loki(model, basis, LokiConfig(k=12, d=4, min_seq=0, sink=1, kernels=kernels))
        texts.append(model.generate(prompt, max_new_tokens=6, do_sample=False))
    assert torch.equal(*texts)
    if DEVICE == "cpu":
        monkeypatch.delenv("TRITON_INTERPRET")
        with pytest.raises(UserError, match="needs a GPU"):
            enable_loki(model, basis, LokiConfig(kernels="triton"))


@pytest.mark.slow
def test_kernels_compile_for_a_gpu() -> None:
    """Without one: down to the machine code of an H100, for the types and sizes of real models."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("compile_loki_kernels.py")
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("sm_90") == 7 * 4
