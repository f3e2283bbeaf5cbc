"""Score all keys of a head by their codes, compiled by Numba.

The codes of a byte have 256 combinations. For each combination, a table has the dot product of these codes with the
same components of a query. So each byte of a key needs only one look-up.

Shape letters as in numba_kernels.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from fourfold.inference.loki.codes import BITS, INTERVALS, PER_BYTE
from fourfold.inference.loki.numba_functions import compiled

TABLES = 8
"""Number of bytes of a key that are looked up together. Each byte has its own table. The tables of this many bytes fit
into the processor's first-level cache."""


@compiled
def score(query_Hd, code_SC, scores_HS):
    """Write the dot product of every query head with the codes of every key to ``scores_HS``, four heads at a time."""
    table_NB4 = np.empty((TABLES, 256, 4), np.float32)
    size = code_SC.shape[1]
    for h in range(0, query_Hd.shape[0], 4):
        first = 0
        while first < size:
            for n in range(min(TABLES, size - first)):
                _fill(table_NB4[n], query_Hd[h : h + 4], first + n, size)
            if size - first >= TABLES:
                _look_up_8(table_NB4, code_SC, first, scores_HS[h : h + 4])
                first += TABLES
            elif size - first >= 4:
                _look_up_4(table_NB4, code_SC, first, scores_HS[h : h + 4])
                first += 4
            else:
                _look_up_1(table_NB4, code_SC, first, scores_HS[h : h + 4])
                first += 1


def _look_up(count: int) -> Callable[..., None]:
    """Return a compiled function that adds the table entries of ``count`` bytes to the scores of four query heads. For
    the first bytes of the codes, it overwrites the scores instead."""
    sum_of = _sum_of_entries(count)

    @compiled
    def look_up(table_NB4, code_SC, first, scores_4S):
        scores0, scores1, scores2, scores3 = scores_4S[0], scores_4S[1], scores_4S[2], scores_4S[3]
        for s in range(code_SC.shape[0]):
            sum0, sum1, sum2, sum3 = sum_of(table_NB4, code_SC, s, first)
            if first:
                sum0, sum1, sum2, sum3 = sum0 + scores0[s], sum1 + scores1[s], sum2 + scores2[s], sum3 + scores3[s]
            scores0[s], scores1[s], scores2[s], scores3[s] = sum0, sum1, sum2, sum3

    return look_up  # type: ignore[no-any-return]


def _sum_of_entries(count: int) -> Callable[..., Any]:
    """Return a compiled function that looks up ``count`` bytes of a key's codes in their tables, and returns the sum of
    the entries. An entry has four numbers, one for each query head.

    The function adds four numbers with one instruction. The compiler does not find this instruction by itself.
    """

    @intrinsic
    def look_up(_, table_NB4, code_SC, s, first):
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            table_type, code_type = signature.args[:2]
            table = context.make_array(table_type)(context, builder, arguments[0])
            codes = context.make_array(code_type)(context, builder, arguments[1])
            zero, four = ir.IntType(64)(0), ir.VectorType(ir.FloatType(), 4)
            sums = None
            for n in range(count):
                places: tuple[Any, ...] = (arguments[2], builder.add(arguments[3], ir.IntType(64)(n)))
                byte = builder.load(
                    cgutils.get_item_pointer(context, builder, code_type, codes, places, wraparound=False)
                )
                places = (ir.IntType(64)(n), builder.zext(byte, ir.IntType(64)), zero)
                entry = cgutils.get_item_pointer(context, builder, table_type, table, places, wraparound=False)
                numbers = builder.load(builder.bitcast(entry, ir.PointerType(four)), align=4)
                sums = numbers if sums is None else builder.fadd(sums, numbers)
            heads = [builder.extract_element(sums, ir.IntType(32)(h)) for h in range(4)]
            return context.make_tuple(builder, signature.return_type, heads)

        return types.UniTuple(types.float32, 4)(table_NB4, code_SC, types.intp, types.intp), generate

    return look_up


_look_up_8, _look_up_4, _look_up_1 = _look_up(TABLES), _look_up(4), _look_up(1)


@compiled
def _fill(table_B4, query_4d, c, size):
    """For each value of byte c, write the dot products of its codes with four query heads to a table."""
    table_B4[:] = np.float32(0)
    for byte in range(256):
        for place in range(PER_BYTE):
            code = np.float32((byte >> (place * BITS)) & (INTERVALS - 1))
            for h in range(4):
                table_B4[byte, h] += query_4d[h, place * size + c] * code
