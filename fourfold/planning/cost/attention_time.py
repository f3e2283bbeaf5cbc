"""Compute the time of the attention core of one block for one micro-batch, and determine which attention kernel the
training framework uses."""

import numpy as np

from fourfold.planning.array_fields import Flag, Number
from fourfold.planning.cost.rates import Rates
from fourfold.planning.cost.tensor_sizes import (
    WIDEST_CUDNN,
    attention_over_y,
    capped_scores,
    caps_scores,
    heads_on_rank,
    is_ring,
)
from fourfold.planning.cost.terms import attention_core
from fourfold.planning.machines.machine import Machine
from fourfold.planning.workload import Workload


def attention_seconds(work: Workload, rates: Rates, machine: Machine) -> tuple[Number, Number]:
    """Return the seconds of the forward and of the backward pass of the attention core on one rank. The ranks of the
    axes x, y, and cp divide the heads, sequences, or queries among themselves."""
    model, layout, step, program = work.model, work.layout, work.step, work.program
    seq, ranks = step.seq_length, layout.x * layout.y * layout.cp
    queries = layout.micro_batch_size * seq * model.queries / model.head_dim / ranks
    scores = queries * step.seq_length
    flops = 4 * queries * keys_computed(work) * model.head_dim
    flash = attention_core.flash_seconds(
        flops, step.seq_length, model.head_dim, rate=rates.attention, kernel=kernel_of(work, machine)
    )
    how = {"rate": rates.matmul, "bandwidth": rates.bandwidth}
    plain = softmax_is_plain(work)
    moved = np.where(plain, attention_core.PLAIN_FORWARD, attention_core.UNFUSED_FORWARD)
    moved_back = np.where(plain, attention_core.PLAIN_BACKWARD, attention_core.UNFUSED_BACKWARD)
    forward = attention_core.unfused_seconds(scores, model.head_dim, **how, moved_per_score=moved)
    backward = attention_core.unfused_seconds(2 * scores, model.head_dim, **how, moved_per_score=moved_back / 2)
    forward = np.where(program.flash, flash, forward)
    backward = np.where(program.flash, attention_core.BACKWARD * flash, backward)
    if not np.any(caps_scores(work)):
        return forward, backward
    capped = attention_core.capped_seconds(queries * capped_scores(work).computed, model.head_dim, **how)
    is_capped = caps_scores(work)
    return np.where(is_capped, capped[0], forward), np.where(is_capped, capped[1], backward)


def keys_computed(work: Workload) -> Number:
    """Return the number of keys per query that a kernel computes scores for, as a mean over all queries, heads, and
    blocks.

    Usually, these are the keys that the query attends to. fourfold computes more scores, and masks some of them, in two
    cases:

    - If the y ranks divide the queries of a sequence among themselves, each query gets scores for all keys.
    - In a ring with a sliding window, let n be the number of keys per rank. A query gets scores for the n keys of its
      own rank, and for about n / 2 + window keys of other ranks (but at most half of their keys).
    """
    model, layout, seq = work.model, work.layout, work.step.seq_length
    seen, own = model.keys_seen(seq), seq / layout.cp
    in_ring = np.minimum(own + (own / 2 + model.sliding_window) * (1 - 1 / layout.cp), (seq + own) / 2)
    slides = fourfold_ring(work) & (np.asarray(model.sliding_window) > 0) & (np.asarray(model.sliding_window) < seq)
    ring = (1 - model.sliding) * seq / 2 + model.sliding * in_ring
    all_keys = np.asarray(work.program.is_fourfold, bool) & (attention_over_y(work) == "sequence")
    return np.where(all_keys, seq, np.where(slides, ring, seen))


def fourfold_ring(work: Workload) -> Flag:
    """Return whether the framework is fourfold and passes keys and values around a ring."""
    return work.program.is_fourfold & is_ring(work)


def kernel_of(work: Workload, machine: Machine) -> attention_core.Kernel:
    """Return the fused attention kernel that the framework uses: the machine's fastest kernel, or FlashAttention-2."""
    faster, model = np.asarray(machine.flash2) > 0, work.model
    # In ring attention, fourfold uses FlashAttention-2 for wide heads (``parallel.attention.block_attention``). Without
    # a ring, fourfold uses it for sliding windows. If only some blocks of a model have windows, count all blocks as
    # blocks without windows.
    window = np.asarray(model.sliding_window)
    slides = np.equal(model.sliding, 1) & (window > 0) & (window < work.step.seq_length)
    own = work.program.is_fourfold & np.where(fourfold_ring(work), np.greater(model.head_dim, WIDEST_CUDNN), slides)
    newest = faster & ~np.asarray(work.program.flash2 | own, bool)
    return attention_core.Kernel(
        share=np.where(faster & ~newest, machine.flash2 / machine.attention, 1.0),
        half=np.where(faster & ~newest, machine.flash2_half, machine.attention_half),
        narrow=np.where(newest, attention_core.NARROW, attention_core.NARROW_FLASH2),
    )


def softmax_is_plain(work: Workload) -> Flag:
    """Return whether unfused attention computes its softmax with separate operations, because the number of heads does
    not suit the fused softmax kernel (``attention_core.FUSED_HEADS``)."""
    unfused = ~np.asarray(work.program.flash, bool)
    return unfused & (work.layout.micro_batch_size * heads_on_rank(work) % attention_core.FUSED_HEADS != 0)
