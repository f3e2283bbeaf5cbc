"""List faults in the order of tokens and in offload, and join them with the other faults in how ranks divide work."""

from __future__ import annotations

from mutants import X2, Z2, Mutant
from mutants_of_attention import CONTEXT
from mutants_of_batch_parts import PARTS
from mutants_of_data_parallelism import DATA_PARALLEL
from mutants_of_pipelines import PIPELINE

TOKENS_AND_INPUTS = [
    Mutant(
        "attention treats tokens in rank order as if they were in sequence order",
        "parallel.attention.attention:whole_sequences",
        "t.unflatten(0, (ranks, -1)).transpose(0, 1)",
        "t.unflatten(0, (-1, ranks))",
        grid=X2,
    ),
    Mutant(
        "a gather returns tokens in sequence order, but the next split expects rank order",
        "parallel.grid.communicate:_join",
        "parts.movedim(0, dim).flatten(dim, dim + 1)",
        "parts.movedim(0, dim or parts.dim() // 4).flatten(dim, dim + 1)",  # changes only tensors of tokens
        grid=X2,
    ),
    Mutant(
        "offload returns the input of the previous block",
        "parallel.memory.offload:_OnCPU.start_back",
        "self._copies.start(tensor, self._copy)",
        "self._copies.start(tensor, self._before._copy if self._before else self._copy)",
        grid=Z2,
        sections={"activation_checkpoint": {"mode": "full", "offload": True}},
    ),
]

PARALLELISM = [*PARTS, *TOKENS_AND_INPUTS, *DATA_PARALLEL, *PIPELINE, *CONTEXT]
