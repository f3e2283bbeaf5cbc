"""Compile the kernels of the loss down to machine code, without a GPU: PYTHONPATH=tests python FILE"""

from __future__ import annotations

import triton
from compiled_kernels import usage_of
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fourfold.parallel.tensor import loss_kernels

TARGETS = [(GPUTarget("cuda", 90, 32), "cubin"), (GPUTarget("hip", "gfx942", 64), "hsaco")]
TYPES = {"labels": "*i64", "both": "*fp32", "normalizers": "*fp32", "factors": "*fp32", "softcap": "fp32"}


def compile_both(dtype: str, capped: bool) -> None:
    """Compile both kernels as they are launched for a large vocabulary, with aligned pointers and rows."""
    for name in ("_normalize", "_differentiate"):
        kernel = getattr(loss_kernels, name)
        fixed = {"CAPPED": capped, "BLOCK": loss_kernels.BLOCK}
        types = TYPES | {"logits": f"*{dtype}"} | dict.fromkeys(fixed, "constexpr")
        signature = {p.name: types.get(p.name, "i32") for p in kernel.params}
        aligned = [
            i for i, (parameter, type_) in enumerate(signature.items()) if type_[0] == "*" or parameter == "of_row"
        ]
        attributes = {(place,): [["tt.divisibility", 16]] for place in aligned}
        for target, code in TARGETS:
            source = ASTSource(kernel, signature, fixed, attributes)
            binary = triton.compile(source, target=target, options={"num_warps": 8})
            usage = usage_of(binary.asm[code]) if code == "cubin" else None
            assert usage is None or usage.stack == 0, (name, dtype, usage)
            print(name, dtype, capped, target.arch, len(binary.asm[code]) > 0, usage)


if __name__ == "__main__":
    for dtype in ("bf16", "fp16", "fp32"):
        for capped in (False, True):
            compile_both(dtype, capped)
