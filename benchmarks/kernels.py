"""Attention kernels against fp64, and the kernels that torch chooses for what the model asks.

    python -m benchmarks.kernels [--device cpu] [--json FILE]

The first table is the largest error of outputs and gradients, over that of torch's plain attention in the same type;
packed are documents by the kernel that needs no mask.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.options import add_tiny
from fourfold.parallel.block_attention import Scores, attend_block, attend_block_backward
from fourfold.parallel.document_attention import attend_documents, attend_documents_backward

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
MASKS = ("none", "causal", "documents")
Tensors = tuple[Tensor, ...]


def main() -> int:
    arguments = _arguments()
    device = torch.device(arguments.device)
    lengths = [64] if arguments.tiny else [512, 4096]
    errors = [
        error_of(name, mask, length, device)
        for name, mask, length in itertools.product(DTYPES, (*MASKS, "packed"), lengths)
    ]
    print(f"{'type':6}{'mask':12}{'length':>8}{'ours':>12}{'plain':>12}{'ratio':>8}")
    for row in errors:
        print(
            f"{row['type']:6}{row['mask']:12}{row['length']:8}{row['ours']:12.3g}{row['plain']:12.3g}{row['ratio']:8.2f}"
        )
    chosen = [
        {
            "type": name,
            "mask": mask,
            "grouped": grouped,
            "kernel": chosen_kernel(name, mask, grouped, lengths[-1], device),
        }
        for name, mask, grouped in itertools.product(DTYPES, MASKS, (False, True))
    ]
    print(f"\n{'type':6}{'mask':12}{'grouped':>8}  kernel")
    for row in chosen:
        print(f"{row['type']:6}{row['mask']:12}{row['grouped']!s:>8}  {row['kernel']}")
    if arguments.json:
        record = {"torch": torch.__version__, "device": arguments.device, "errors": errors, "chosen": chosen}
        Path(arguments.json).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0


def error_of(name: str, mask: str, length: int, device: torch.device) -> dict[str, Any]:
    """The largest error of our attention of a block and of torch's plain one, both against fp64."""
    dtype = DTYPES[name]
    q, k, v, gradient = (t.to(dtype) for t in inputs(length, device))
    seen = mask_of(mask, length, device)
    exact = differentiated(*(t.double() for t in (q, k, v, gradient)), seen)
    ours = packed(q, k, v, gradient) if mask == "packed" else block(q, k, v, gradient, mask, seen)
    plain = differentiated(q, k, v, gradient, seen)
    error, plain_error = (
        max((float((a.double() - b).abs().max()) for a, b in zip(found, exact, strict=True)), default=0.0)
        for found in (ours, plain)
    )
    ratio = error / plain_error
    return {"type": name, "mask": mask, "length": length, "ours": error, "plain": plain_error, "ratio": ratio}


def block(q: Tensor, k: Tensor, v: Tensor, gradient: Tensor, mask: str, seen: Tensor) -> Tensors:
    """The attention of one step of the ring, and its gradients."""
    how = mask == "causal", seen if mask == "documents" else None, Scores(q.shape[-1] ** -0.5)
    out, lse = attend_block(q, k, v, *how)
    return out, *attend_block_backward(gradient, q, out, lse, k, v, *how)


def packed(q: Tensor, k: Tensor, v: Tensor, gradient: Tensor) -> Tensors:
    """Attention inside documents without a mask, and its gradients."""
    tensors = [t.transpose(1, 2).contiguous() for t in (q, k, v)]
    length = tensors[0].shape[1]
    ends = torch.tensor(document_ends(length), device=q.device).expand(2, -1)
    scale = q.shape[-1] ** -0.5
    out, lse = attend_documents(*tensors, ends, scale)
    gradients = attend_documents_backward(
        gradient.transpose(1, 2).contiguous(), *tensors, out, lse, ends, scale, window=0, softcap=0.0
    )
    return tuple(t.transpose(1, 2) for t in (out, *gradients))


def document_ends(length: int) -> list[int]:
    """Three documents of different lengths."""
    return [length // 5, length // 2, length]


def inputs(length: int, device: torch.device) -> Tensors:
    """Queries of eight heads, keys and values of two, and a gradient."""
    torch.manual_seed(0)
    return tuple(torch.randn(2, heads, length, 64, device=device) for heads in (8, 2, 2, 8))


def mask_of(name: str, length: int, device: torch.device) -> Tensor:
    """True where a query sees a key."""
    if name == "none":
        return torch.ones(1, 1, length, length, dtype=torch.bool, device=device)
    places = torch.arange(length, device=device)
    causal = places[:, None] >= places
    if name in ("documents", "packed"):
        documents = sum((places >= end for end in document_ends(length)), torch.zeros_like(places))
        causal &= documents[:, None] == documents
    return causal[None, None].expand(2, 1, -1, -1)


def differentiated(q: Tensor, k: Tensor, v: Tensor, gradient: Tensor, seen: Tensor) -> Tensors:
    """Attention by its definition, in the type of its inputs, and the gradients of q, k and v."""
    q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
    keys, values = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    scores = (q @ keys.mT / math.sqrt(q.shape[-1])).masked_fill(~seen, -torch.inf)
    out = scores.softmax(-1) @ values
    out.backward(gradient)
    assert q.grad is not None and k.grad is not None and v.grad is not None
    return out.detach(), q.grad, k.grad, v.grad


def chosen_kernel(name: str, mask: str, grouped: bool, length: int, device: torch.device) -> str:
    """The kernel behind ``scaled_dot_product_attention``."""
    q, k, v, _ = (t.to(DTYPES[name]) for t in inputs(length, device))
    if not grouped:
        k, v = (t.repeat_interleave(4, dim=1) for t in (k, v))
    seen = mask_of(mask, length, device) if mask == "documents" else None
    options = {"is_causal": mask == "causal", "enable_gqa": grouped}
    scaled_dot_product_attention(q, k, v, seen, **options)
    return SDPBackend(torch._fused_sdp_choice(q, k, v, seen, 0.0, **options)).name


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--json", metavar="FILE", help="also write the tables there")
    add_tiny(parser)
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
