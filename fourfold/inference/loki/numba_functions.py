"""Define small functions that the Numba kernels inline: the exponential function, the logarithm, prefetching, and the
conversion to float32."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic, overload

CACHE_LINE = 64

OPTIONS: dict[str, Any] = {
    "nogil": True,
    "error_model": "numpy",
    "fastmath": {"reassoc", "contract", "nsz", "arcp", "afn"},
}
"""Options of Numba's compiler. Sums may be reordered so that they vectorize. Infinities and NaNs are handled correctly.
"""

compiled, inlined = njit(**OPTIONS), njit(inline="always", **OPTIONS)


@inlined
def exp(x):
    """Return e^x for x ≤ 0, but at least e^−87. Compute 2^n · e^r with |r| ≤ ln 2 / 2, with a series up to r⁶ for e^r.
    The relative error is at most 4e−7 for x ≥ −5, and at most 4e−6 for x ≥ −87.

    The compiler can vectorize this function. The C library's function takes only one number at a time.
    """
    x = np.float32(-87) if x < np.float32(-87) else x  # A NaN stays NaN, because it is not below −87.
    powers_of_two = x * np.float32(1 / np.log(2))
    n = np.floor(powers_of_two + np.float32(0.5))
    r = (powers_of_two - n) * np.float32(np.log(2))
    series = np.float32(1 / 720)
    series = series * r + np.float32(1 / 120)
    series = series * r + np.float32(1 / 24)
    series = series * r + np.float32(1 / 6)
    series = series * r + np.float32(1 / 2)
    series = (series * r + np.float32(1)) * r + np.float32(1)
    return np.float32(series * np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32))


@inlined
def log(x):
    """Return the natural logarithm of a normal number x > 0. Return a finite number for a NaN. Compute n · ln 2 + ln m
    with m from √½ to √2, and a series for ln m.

    The error is below 2e−7 if the result is between −1 and 1. Otherwise the relative error is below 2e−7.
    """
    root = np.int32(0x3F3504F3)  # The bits of √½.
    bits = np.int32(np.float32(x).view(np.int32) - root)
    n = np.int32(bits >> np.int32(23))
    m = np.int32((bits & np.int32(0x7FFFFF)) + root).view(np.float32)
    z = (m - np.float32(1)) / (m + np.float32(1))
    square = z * z
    series = (square * np.float32(2 / 7) + np.float32(2 / 5)) * square + np.float32(2 / 3)
    return np.float32(n) * np.float32(np.log(2)) + z * (series * square + np.float32(2))


@inlined
def prefetch_row(rows_SD, row):
    """Prefetch a row of a matrix into the processor's cache."""
    for c in range(0, rows_SD.shape[1], CACHE_LINE // rows_SD.itemsize):
        _prefetch(rows_SD, row, c)


@intrinsic
def _prefetch(_, rows, row, column):
    """Issue the prefetch instruction for the cache line that holds rows[row, column]."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        place = cgutils.get_item_pointer(context, builder, signature.args[0], array, arguments[1:], wraparound=False)
        address, number = ir.PointerType(ir.IntType(8)), ir.IntType(32)
        function_type = ir.FunctionType(ir.VoidType(), [address, number, number, number])
        prefetch = builder.module.declare_intrinsic("llvm.prefetch", [address], function_type)
        to_read, keep, data = number(0), number(3), number(1)
        builder.call(prefetch, [builder.bitcast(place, address), to_read, keep, data])
        return context.get_dummy_value()

    return types.void(rows, types.intp, types.intp), generate


def as_float32(number):
    """Return a number of the key-value cache as float32. This function works only in compiled code."""
    raise NotImplementedError


@overload(as_float32, inline="always")
def _compile_as_float32(number):
    if number == types.uint16:  # An unsigned 16-bit integer holds the bits of a bfloat16.
        return lambda number: np.uint32(np.uint32(number) << np.uint32(16)).view(np.float32)
    return lambda number: number
