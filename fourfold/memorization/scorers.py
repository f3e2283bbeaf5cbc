"""Score every token of documents in one forward pass, with a model on a grid or a Hugging Face model. Each rank
computes scores from its own logits, so no rank needs the logits of all tokens."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from fourfold.checkpoints.checkpoint import load_sharded_weights
from fourfold.config.during_training import EMAConfig
from fourfold.config.layout import CHUNK_LOGITS
from fourfold.config.run import RunConfig
from fourfold.data.loader import MicroBatch
from fourfold.huggingface.transformers_models import load_model
from fourfold.memorization.scores import AttackSampling, score_logits
from fourfold.models.softcap import softcapped
from fourfold.parallel.attention.context import share_of_sequences, take_chunks
from fourfold.parallel.grid.communicate import all_gather, reduce_scatter
from fourfold.parallel.grid.grid import Grid
from fourfold.parallel.tensor.head import ParallelHead, chunk_size
from fourfold.training.job import Job

TokenRows = list[NDArray[np.int64]]
Scores = list[NDArray[np.float32]]
Fields = Callable[[Tensor, Tensor], Tensor]
"""A function of logits [m, V] and targets [m]. It returns F numbers (fields) for each of the m target tokens, [F, m].
It may overwrite the logits."""


class Scorer(Protocol):
    """A model that scores tokens. Every process of its grid must call ``score`` with the same documents."""

    vocab_size: int
    max_length: int | None
    """Longest input in tokens. None if unknown."""

    def score(self, documents: TokenRows, fields: Fields | None = None, last: int | None = None) -> Scores | None:
        """Score every token of each document except the first.

        Args:
            documents: Token ids of each document [T].
            fields: The function that computes the fields (numbers) of each token. Default: ``score_logits`` with the
                attacker's sampling scheme.
            last: If given, return only the fields of this many tokens at each document's end.

        Returns:
            On rank 0, the fields of each document: [F, T - 1], or [F, last] if ``last`` is given. On other ranks None.
        """
        ...


class GridScorer:
    """Scores tokens with the model of a job, on the job's grid.

    The run's ``training.seq_length`` is the longest input, and ``micro_batch_size`` is the number of documents that one
    rank scores in one forward pass. Documents are distributed over the axes dp and z.
    """

    def __init__(self, job: Job, sampling: AttackSampling) -> None:
        self.job, self.fields = job, partial(score_logits, sampling=sampling)
        self.vocab_size = job.run.model.vocab_size
        self.max_length: int | None = job.run.training.seq_length

    @classmethod
    def load(cls, run: RunConfig, checkpoint: Path, device: torch.device, sampling: AttackSampling) -> Self:
        """Load the weights of a checkpoint onto the grid of ``run``, without the states of the optimizer and the
        weight averages. Return a scorer."""
        # Do not use tuned matmul layouts, because they were tuned for training steps.
        training = run.training.model_copy(update={"tuned_products": "off"})
        run = run.model_copy(update={"training": training, "ema": EMAConfig()})
        job = Job(run, Grid(run.parallel, device.type), device)
        load_sharded_weights(checkpoint, job)
        return cls(job, sampling)

    def score(self, documents: TokenRows, fields: Fields | None = None, last: int | None = None) -> Scores | None:
        grid, size = self.job.grid, self.job.run.training.micro_batch_size
        order = sorted(range(len(documents)), key=lambda number: len(documents[number]))
        at_once = size * grid.batch.size
        groups = [order[first : first + at_once] for first in range(0, len(order), at_once)]
        mine = [group[grid.batch.rank :: grid.batch.size] for group in groups]
        micro_batches = []
        for group, here in zip(groups, mine, strict=True):
            rows, width = [documents[n] for n in here], self._width(documents[group[-1]])
            micro_batch = MicroBatch(*_padded(rows, size, width, self.job.device))
            micro_batches.append(share_of_sequences(micro_batch, grid.cp))
        with scoring_head(self.job, fields or self.fields):
            outputs = self.job.outputs(micro_batches)  # On ranks without the last stage, the result is empty.
        scored = [
            (number, _of_document(fields_FS, documents[number], last))
            for here, fields_FBT in zip(mine, outputs, strict=bool(outputs))
            for number, fields_FS in zip(here, self._in_order(fields_FBT).unbind(1), strict=False)
        ]
        return self._gather(scored, len(documents))

    def _width(self, longest: NDArray[np.int64]) -> int:
        """Return the length to which inputs are padded: the smallest length that fits ``longest``, the longest
        document, and that the grid can split. With pipeline stages, inputs always have the length
        ``training.seq_length``."""
        axes = self.job.run.parallel
        if axes.pp > 1:
            return self.job.run.training.seq_length
        divisor = axes.x * axes.y * (2 * axes.cp if axes.cp > 1 else 1)
        return -(-(len(longest) - 1) // divisor) * divisor

    def _in_order(self, fields_FBT: Tensor) -> Tensor:
        """Gather the fields from all ranks of the context-parallel axis cp, and put the tokens in order. Return the
        fields of full sequences, [F, B, S]."""
        cp = self.job.grid.cp
        whole = all_gather(fields_FBT, cp, 2, "audit: scores")
        places_1S = torch.arange(whole.shape[2], device=whole.device)[None]
        order_S = torch.cat([take_chunks(places_1S, rank, cp.size)[0] for rank in range(cp.size)])
        return whole[:, :, order_S.argsort()].cpu()

    def _gather(self, mine: list[tuple[int, Tensor]], count: int) -> Scores | None:
        grid = self.job.grid
        first_of_its_batch = grid.axis("y_x").rank == 0 and grid.cp.rank == 0
        everyone: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object([(n, f.numpy()) for n, f in mine] if first_of_its_batch else [], everyone)
        if everyone is None:
            return None
        found = dict(pair for part in everyone for pair in part)
        return [found[number] for number in range(count)]


class HuggingFaceScorer:
    """Scores tokens with a model of the transformers library, on one process."""

    def __init__(self, name: str, device: torch.device, sampling: AttackSampling, micro_batch_size: int) -> None:
        self.model = load_model(name, device=str(device))
        self.vocab_size: int = self.model.config.vocab_size
        self.max_length: int | None = getattr(self.model.config, "max_position_embeddings", None)
        self.device, self.micro_batch_size = device, micro_batch_size
        self.fields = partial(score_logits, sampling=sampling)
        types = [str(getattr(module, "rope_type", "")) for module in self.model.modules()]
        self.depends_on_length = any("dynamic" in each or "longrope" in each for each in types)
        """Whether the rotary frequencies depend on the longest sequence of a batch."""

    @torch.no_grad()
    def score(self, documents: TokenRows, fields: Fields | None = None, last: int | None = None) -> Scores:
        order, at_once = sorted(range(len(documents)), key=lambda n: len(documents[n])), self.micro_batch_size
        alike = groupby(order, lambda number: len(documents[number]) if self.depends_on_length else 0)
        groups = [list(group) for _, group in alike]
        found: dict[int, NDArray[np.float32]] = {}
        for together in (group[n : n + at_once] for group in groups for n in range(0, len(group), at_once)):
            # In some rotary embeddings, the frequencies depend on the longest sequence so far. Reset this length, so
            # that a score does not depend on earlier documents.
            for module in self.model.modules():
                vars(module).update({key: 0 for key in vars(module) if key.endswith("max_seq_len_cached")})
            rows = [documents[number] for number in together]
            inputs, targets = _padded(rows, len(rows), len(rows[-1]) - 1, self.device)
            # Padding is on the right, so a causal model's tokens do not see it.
            logits = self.model(input_ids=inputs, use_cache=False).logits
            fields_FN = _score_in_chunks(logits.flatten(0, 1), targets.flatten(), fields or self.fields)
            fields_FBS = fields_FN.unflatten(1, inputs.shape).cpu()
            found |= {n: _of_document(fields_FBS[:, row], documents[n], last).numpy() for row, n in enumerate(together)}
        return [found[number] for number in range(len(documents))]


@contextmanager
def scoring_head(job: Job, fields: Fields) -> Iterator[None]:
    """While the ``with`` block runs, the model's head returns the fields [F, B, S] of the targets instead of the loss.

    The function replaces only the head's ``forward``, not the head, because FSDP2 must still gather the head's weights.
    """
    heads = [stage.model.lm_head for stage in job.stages.values() if stage.model.lm_head is not None]
    for head in heads:
        assert isinstance(head, ParallelHead), type(head)
        vars(head)["forward"] = partial(_scored, head, fields=fields)
    try:
        yield
    finally:
        for head in heads:
            del vars(head)["forward"]


def _scored(
    head: ParallelHead, x_BTh: Tensor, targets_BS: Tensor, loss_scale: float = 1.0, *, fields: Fields
) -> Tensor:
    """Return the fields of the targets, [F, B, S]. Compute one chunk of tokens at a time. Within a chunk, each rank of
    the tensor-parallel axis y computes the fields of a part of the tokens, from their full logits."""
    x_BSh = all_gather(x_BTh, head.x, 1, "audit: tokens")
    x_Nh, targets_N = x_BSh.flatten(0, 1), targets_BS.flatten()
    size = chunk_size(x_Nh.shape[0], head.weight.shape[0] * head.x.size, head.y.size, head.chunk_logits)
    parts = []
    for begin in range(0, x_Nh.shape[0], size):
        chunk = slice(begin, min(begin + size, x_Nh.shape[0]))
        logits_mv = reduce_scatter(x_Nh[chunk] @ head.weight.T, head.y, 0, "audit: logits").float()
        logits_mV = all_gather(logits_mv, head.x, 1, "audit: logits")[:, : head.vocab_size]
        logits_mV = softcapped(logits_mV, head.softcap)
        targets_m = targets_N[chunk].chunk(head.y.size)[head.y.rank]
        parts.append(all_gather(fields(logits_mV, targets_m), head.y, 1, "audit: scores"))
    return torch.cat(parts, dim=1).view(-1, *targets_BS.shape)


def _score_in_chunks(logits_NV: Tensor, targets_N: Tensor, fields: Fields) -> Tensor:
    size = max(1, CHUNK_LOGITS[logits_NV.device.type] // logits_NV.shape[1])
    pairs = zip(logits_NV.split(size), targets_N.split(size), strict=True)
    return torch.cat([fields(logits, targets) for logits, targets in pairs], dim=1)


def _of_document(fields_FS: Tensor, document: NDArray[np.int64], last: int | None) -> Tensor:
    """Return the fields of the last ``last`` tokens of a document, without padding. If ``last`` is None, return the
    fields of all tokens after the first."""
    return fields_FS[:, : len(document) - 1][:, -(last or len(document)) :]


def _padded(documents: TokenRows, rows: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return inputs and targets [rows, width], padded with zeros. Inputs are all tokens except the last, and targets
    are all tokens except the first."""
    tokens = np.zeros((2, rows, width), dtype=np.int64)
    for row, document in enumerate(documents):
        tokens[0, row, : len(document) - 1] = document[:-1]
        tokens[1, row, : len(document) - 1] = document[1:]
    inputs, targets = torch.from_numpy(tokens).to(device)
    return inputs, targets
