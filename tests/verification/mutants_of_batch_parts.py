"""List faults in how batch parts take turns and are joined again."""

from __future__ import annotations

from mutants import FULL, PACKED, SIX_HEADS, TWO_PARTS, X2, X2Y2, Y2, Mutant
from tiny_runs import GPT

PARTS = [
    Mutant(  # AxoNN has this fault with torch's recomputation: its overlap loses all weight gradients
        "weight gradients deferred to a later backward step are lost",
        "parallel.tensor.linear_steps:_Keep.backward",
        "later.start(compute)",
        "later.start(lambda: [None] * len(needed))",
        GPT,
        X2Y2,
        TWO_PARTS | FULL,
    ),
    Mutant(
        "the outputs of the batch parts are swapped",
        "overlap_order:run_batch_parts",
        "results[part.index] = end.value",
        "results[-part.index] = end.value",
        GPT,
        Y2,
        TWO_PARTS,
    ),
    Mutant(
        "if batch parts split a sequence, its tokens are joined part by part, not rank by rank",
        "parallel.overlap.batch_parts:JoinedAttention.take",
        "torch.stack([t.unflatten(1, (self._ranks, -1)) for t in each], 2)",
        "torch.stack([t.unflatten(1, (self._ranks, -1)) for t in each], 1)",
        SIX_HEADS,
        X2Y2,  # y splits the batch
        {"overlap": {"batch_parts": 4}},
    ),
    Mutant(
        "one part of a sequence gets the attention outputs of another part",
        "parallel.overlap.batch_parts:JoinedAttention.take",
        "return self._attended.pop(index)",
        "return self._attended.popitem()[1]",
        GPT,
        X2Y2,
        {"overlap": {"batch_parts": 4}},
    ),
    Mutant(
        "every batch part uses the document boundaries of the first part",
        "parallel.attention.context:context_of_sequences",
        "table[sequences]",
        "table[: sequences.stop - sequences.start]",
        grid=X2,
        sections=TWO_PARTS | PACKED,
    ),
    Mutant(
        "a layer uses the rank's partial sum instead of the sum over y",
        "parallel.tensor.spread:Spread.start_sums",
        "sums.append(start_all_reduce(partial(), self.axis, why))",
        "sums.append(Pending((own := partial(), start_all_reduce(own.clone(), self.axis, why).wait())[0]))",
        GPT,
        Y2,
        TWO_PARTS,
    ),
]
