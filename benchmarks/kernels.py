"""Measure the numerical errors of fourfold's attention, and list the kernels that torch chooses for it.

    python -m benchmarks.kernels [--device cpu] [--json FILE]

Errors are differences from attention in fp64. The first table shows the largest error of the outputs and gradients,
divided by the error of torch's plain attention in the same dtype. The table covers several head widths, numbers of
query heads per key-value head, and lengths that are not a multiple of any block size. "packed" is the kernel that
separates documents without a mask. "blind" is a mask with rows that see no keys.
"""

from __future__ import annotations

import argparse
import itertools
import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from benchmarks.one_gpu import device_of, name_of
from benchmarks.options import add_device, failure_in, write_figures
from fourfold.parallel.attention.block_attention import AttentionScores, attend_block, attend_block_backward
from fourfold.parallel.attention.document_attention import attend_documents, attend_documents_backward

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
MASKS = ("none", "causal", "documents", "blind", "packed")
SIZES: list[tuple[int, int, int]] = [
    *((length, 64, 4) for length in (512, 4096, 1001)),
    *((333, width, 4) for width in (80, 96, 128, 192, 256)),
    *((500, 128, group) for group in (1, 7, 8)),
    (1, 64, 8),
    (77, 72, 7),
]
"""For each case, the length, the head width, and the number of query heads per key-value head."""
TINY = [(64, 64, 4), (33, 80, 7)]
KEYS = ("type", "mask", "length", "width", "group")
Tensors = tuple[Tensor, ...]


def main() -> int:
    arguments = _arguments()
    device = device_of(arguments.device)
    sizes = TINY if arguments.tiny else SIZES
    record: dict[str, Any] = {"torch": torch.__version__, "device": name_of(device), "errors": [], "chosen": []}
    head = f"{'length':>8}{'width':>7}{'group':>7}"
    print(f"{'type':6}{'mask':12}{head}{'ours':>12}{'plain':>12}{'ratio':>8}")
    for size, name, mask in itertools.product(sizes, DTYPES, MASKS):
        row: dict[str, Any] = dict(zip(KEYS, (name, mask, *size), strict=True))
        with failure_in(row):
            row |= error_of(name, mask, *size, device)
            end = f"{row['ours']:12.3g}{row['plain']:12.3g}{row['ratio']:8.2f}"
        if "error" in row:
            end = f"  failed: {row['error'].splitlines()[0][:100]}"
        print(f"{name:6}{mask:12}{size[0]:8}{size[1]:7}{size[2]:7}{end}", flush=True)
        record["errors"].append(row)
        write_figures(arguments.json, record)
    print(f"\n{'type':6}{'mask':12}{head}  kernel")
    for (length, width, group), name, mask in itertools.product(sizes, DTYPES, MASKS[:3]):
        row = dict(zip(KEYS, (name, mask, length, width, group), strict=True))
        row["kernel"] = chosen_kernel(name, mask, length, width, group, device)
        print(f"{name:6}{mask:12}{length:8}{width:7}{group:7}  {row['kernel']}")
        record["chosen"].append(row)
    write_figures(arguments.json, record)
    return 1 if all("error" in row for row in record["errors"]) else 0


def error_of(name: str, mask: str, length: int, width: int, group: int, device: torch.device) -> dict[str, float]:
    """Return the largest error of fourfold's attention, and the largest error of torch's plain attention. Both are
    differences from attention in fp64."""
    dtype = DTYPES[name]
    q, k, v, gradient = (t.to(dtype) for t in inputs(length, width, group, device))
    seen = mask_of(mask, length, device)
    exact = differentiated(q.double(), k.double(), v.double(), gradient.double(), seen)
    ours = packed(q, k, v, gradient) if mask == "packed" else block(q, k, v, gradient, mask, seen)
    plain = differentiated(q, k, v, gradient, seen)
    error, plain_error = (
        max(float((a.double() - b).abs().max()) for a, b in zip(found, exact, strict=True)) for found in (ours, plain)
    )
    assert math.isfinite(error), "our attention is not finite"
    return {"ours": error, "plain": plain_error, "ratio": error / plain_error if plain_error else float(error > 0)}


def block(q: Tensor, k: Tensor, v: Tensor, gradient: Tensor, mask: str, seen: Tensor) -> Tensors:
    """Return the attention to one block of keys, as in a step of ring attention, and its gradients. In a ring, a row
    that sees no key of this block sees keys of another block."""
    how = mask == "causal", seen if mask in ("documents", "blind") else None, AttentionScores(q.shape[-1] ** -0.5)
    out, lse = attend_block(q, k, v, *how)
    lse = lse.masked_fill(lse.isneginf(), 0)
    return out, *attend_block_backward(gradient, q, out, lse, k, v, *how)


def packed(q: Tensor, k: Tensor, v: Tensor, gradient: Tensor) -> Tensors:
    """Return the output and gradients of the kernel that computes attention within documents without a mask."""
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
    """Return the ends of three documents of different lengths, or fewer if there are not enough tokens."""
    return [max(1, length // 5), max(1, length // 2), length]


def inputs(length: int, width: int, group: int, device: torch.device) -> Tensors:
    """Return random queries, keys, and values with two KV heads and ``group`` query heads per KV head, and an output
    gradient."""
    torch.manual_seed(0)
    return tuple(torch.randn(2, heads, length, width, device=device) for heads in (2 * group, 2, 2, 2 * group))


def mask_of(name: str, length: int, device: torch.device) -> Tensor:
    """Return a boolean mask. An element is True if the query of its row sees the key of its column."""
    if name == "none":
        return torch.ones(1, 1, length, length, dtype=torch.bool, device=device)
    places = torch.arange(length, device=device)
    causal = places[:, None] >= places
    if name in ("documents", "packed"):
        documents = sum((places >= end for end in document_ends(length)), torch.zeros_like(places))
        causal &= documents[:, None] == documents
    if name == "blind":
        causal &= (places % 3 != 1)[:, None]
    return causal[None, None].expand(2, 1, -1, -1)


def differentiated(q: Tensor, k: Tensor, v: Tensor, gradient: Tensor, seen: Tensor) -> Tensors:
    """Return attention computed from its definition, in the dtype of the inputs, and the gradients of q, k, and v."""
    q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
    keys, values = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    scores = (q @ keys.mT / math.sqrt(q.shape[-1])).masked_fill(~seen, -torch.inf)
    weights = scores.softmax(-1).masked_fill(~seen.any(-1, keepdim=True), 0)
    out = weights @ values
    return out.detach(), *torch.autograd.grad(out, (q, k, v), gradient)


def chosen_kernel(name: str, mask: str, length: int, width: int, group: int, device: torch.device) -> str:
    """Return the name of the kernel that ``scaled_dot_product_attention`` chooses for these sizes."""
    q, k, v, _ = (t.to(DTYPES[name]) for t in inputs(length, width, group, device))
    seen = mask_of(mask, length, device) if mask == "documents" else None
    options = {"is_causal": mask == "causal", "enable_gqa": group > 1}
    return SDPBackend(torch._fused_sdp_choice(q, k, v, seen, 0.0, **options)).name


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_device(parser)
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
