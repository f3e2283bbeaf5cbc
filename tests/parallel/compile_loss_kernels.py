"""Compiles the kernels of the loss down to machine code, without a GPU: python compile_loss_kernels.py"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fourfold.parallel import loss_kernels

TARGETS = [(GPUTarget("cuda", 90, 32), "cubin"), (GPUTarget("hip", "gfx942", 64), "hsaco")]
TYPES = {"labels": "*i64", "both": "*fp32", "normalizers": "*fp32", "factors": "*fp32", "softcap": "fp32"}


def compile_both(dtype: str, capped: bool) -> None:
    """As they are launched for a large vocabulary, with aligned pointers and rows."""
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
            usage = usage_of(binary.asm[code]) if code == "cubin" else ""
            assert "STACK:0 " in usage or code != "cubin", (name, dtype, usage)
            print(name, dtype, capped, target.arch, len(binary.asm[code]) > 0, usage)


def usage_of(cubin: bytes) -> str:
    """Registers, and bytes of local memory that a kernel uses if they do not suffice."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        report = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:\d+ STACK:\d+ ", report)
    assert found is not None, report
    return found.group()


if __name__ == "__main__":
    for dtype in ("bf16", "fp16", "fp32"):
        for capped in (False, True):
            compile_both(dtype, capped)
