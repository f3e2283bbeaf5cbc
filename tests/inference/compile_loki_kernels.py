"""Compile every Loki kernel to machine code, without a GPU: PYTHONPATH=tests python FILE"""

from __future__ import annotations

import torch
import triton
from compiled_kernels import usage_of
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fourfold.inference.loki import triton_attend, triton_kernels
from fourfold.inference.loki.codes import PER_BYTE

TARGETS = [(GPUTarget("cuda", 90, 32), "cubin", 99 * 1024), (GPUTarget("hip", "gfx942", 64), "hsaco", 64 * 1024)]
"""GPUs to compile for, each with its kind of machine code and the shared memory of a block. The GPUs are an H100, whose
warps have 32 threads, and an MI300, whose wavefronts have 64. NVIDIA's number is for compute capabilities 8.6 and 8.9,
which have the least shared memory."""

ALIGNED = [["tt.divisibility", 16]]
SIZES = {"GP": 16, "PP": triton_kernels.MOST_SPLITS, "MASKED": True, "ENDS": True, "LEVEL": 2}
TYPES = {
    **dict.fromkeys(
        ("scores", "maxima", "sums", "partial", "differences", "coded_maxima", "rest", "value_sum", "lse"), "*fp32"
    ),
    **dict.fromkeys(("ranks", "histograms", "ks", "counts", "chosen", "seen"), "*i32"),
    **dict.fromkeys(("visible", "always"), "*i8"),
    "code": "*u8",
    "scaling": "fp32",
}


def compile_all(dtype: torch.dtype, width: int, d: int, group: int) -> None:
    """Compile kernels for heads of this width that rank keys by d components, with ``group`` query heads per key-value
    head. Sizes and pointers are aligned, as at run time."""
    name_of_type = {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]
    tensors = dict.fromkeys(("query", "key", "value", "out"), f"*{name_of_type}")
    for name in ("_score", "_rank", "_refine", "_count", "_collect", "_attend", "_merge"):
        kernel = getattr(triton_attend if name in ("_attend", "_merge") else triton_kernels, name)
        size = d // PER_BYTE
        padded = max(16, triton.next_power_of_2(size if name == "_score" else width))
        of_kernel = {"_attend": triton_attend.CHOSEN_BLOCK, "_merge": triton_attend.MERGED_BLOCK}
        most = of_kernel.get(name, triton_kernels.BLOCK)
        reads_rows = name in ("_score", "_attend")
        values = SIZES | {
            "D": width, "C": size, "DP": padded, "CP": padded, "G": group,
            "SPLIT": triton_attend.CHOSEN_SPLIT if name == "_attend" else triton_kernels.MOST_SPLIT,
            "BLOCK": triton_attend.block_of(padded, torch.empty(0, dtype=dtype), most) if reads_rows else most,
        }  # fmt: skip
        fixed = {p.name: values[p.name] for p in kernel.params if p.is_constexpr}
        signature = {
            p.name: "constexpr" if p.name in fixed else (TYPES | tensors).get(p.name, "i32") for p in kernel.params
        }
        attributes = {
            (place,): ALIGNED
            for place, type_ in enumerate(signature.values())
            if type_ == "i32" or type_.startswith("*")
        }
        for target, code, most_shared in TARGETS:
            binary = triton.compile(ASTSource(kernel, signature, fixed, attributes), target=target)
            assert len(binary.asm[code]) > 0
            assert binary.metadata.shared <= most_shared, (name, dtype, d, width, binary.metadata.shared)
            if code == "cubin":
                assert usage_of(binary.asm[code]).stack == 0, (name, dtype, d, width, "registers spill")
            print(name, dtype, width, d, group, target.arch, binary.metadata.warp_size, binary.metadata.shared)


if __name__ == "__main__":
    compile_all(torch.bfloat16, 128, 64, 4)
    compile_all(torch.bfloat16, 128, 128, 1)
    compile_all(torch.float32, 128, 128, 4)
    compile_all(torch.float32, 256, 64, 4)
