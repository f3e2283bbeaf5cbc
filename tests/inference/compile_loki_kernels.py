"""Compiles every kernel of Loki down to machine code, without a GPU: python compile_loki_kernels.py"""

from __future__ import annotations

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fourfold.inference.loki import kernels

F32, I32, I8 = "*fp32", "*i32", "*i8"
SIZES = {"G": 4, "GP": 16, "D": 128, "DP": 128, "d": 32, "PP": 32, "MASKED": True, "ENDS": True, "LEVEL": 2}
TYPES = {
    **dict.fromkeys(("scores", "maxima", "sums", "partial"), F32),
    **dict.fromkeys(("ranks", "histograms", "ks", "counts", "chosen"), I32),
    **dict.fromkeys(("visible", "always"), I8),
    "scaling": "fp32",
}


def compile_all(dtype: str, reduce: str) -> None:
    tensors = dict.fromkeys(("query", "proxy", "key", "value", "out"), f"*{dtype}")
    for name in ("_score", "_rank", "_refine", "_count", "_collect", "_attend", "_merge"):
        kernel = getattr(kernels, name)
        chosen = name == "_attend"
        blocks = {
            "SPLIT": kernels.CHOSEN_SPLIT if chosen else kernels.MOST_SPLIT,
            "BLOCK": kernels.CHOSEN_BLOCK if chosen else kernels.BLOCK,
        }
        values = SIZES | blocks | {"REDUCE": reduce}
        fixed = {p.name: values[p.name] for p in kernel.params if p.is_constexpr}
        if name == "_score":
            fixed["DP"] = 32
        signature = {
            p.name: "constexpr" if p.is_constexpr else (TYPES | tensors).get(p.name, "i32") for p in kernel.params
        }
        source = ASTSource(kernel, signature, fixed)
        binary = triton.compile(source, target=GPUTarget("cuda", 90, 32))
        assert len(binary.asm["cubin"]) > 0
        print(name, dtype, reduce, "sm_90", binary.metadata.shared)


if __name__ == "__main__":
    compile_all("bf16", "softmax")
    compile_all("fp32", "max")
