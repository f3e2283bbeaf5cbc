"""One forward pass over tokens, scored where the logits are: on any grid of ours, or a Hugging Face model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from fourfold.config.run import RunConfig
from fourfold.errors import UserError
from fourfold.memorization.scores import Sampling, score_logits
from fourfold.models.transformer import Transformer
from fourfold.parallel.communicate import all_gather, reduce_scatter
from fourfold.parallel.context import take_chunks
from fourfold.parallel.grid import Grid
from fourfold.parallel.head import ParallelHead, chunk_size
from fourfold.training.checkpoint import load_model
from fourfold.training.job import meta_model

CHUNK_LOGITS = {"cpu": 1 << 20, "cuda": 1 << 27}
"""Logits that are scored at once."""

Rows = list[NDArray[np.int64]]


class AuditedModel(Protocol):
    """Something that scores tokens. Every process of its grid must call ``score``, with the same documents."""

    vocab_size: int

    def score(self, documents: Rows) -> list[NDArray[np.float32]] | None:
        """For each document of T tokens the fields [5, T - 1] of ``score_logits``; None but on the first process."""
        ...


class GridModel:
    """A checkpoint of ours on the grid of a run file: weights only, no optimizer.

    The run's ``training.seq_length`` is the longest input, and ``micro_batch_size`` the documents that one rank scores
    at once; the documents are shared out over dp and z.
    """

    def __init__(self, run: RunConfig, checkpoint: Path, device: torch.device, sampling: Sampling) -> None:
        self.run, self.device, self.sampling = run, device, sampling
        self.vocab_size = run.model.vocab_size
        self.grid = Grid(run.parallel, device.type)
        self.model = meta_model(run, self.grid)
        self.model.materialize(device)
        load_model(checkpoint, self.model)

    @torch.no_grad()
    def score(self, documents: Rows) -> list[NDArray[np.float32]] | None:
        size, ranks = self.run.training.micro_batch_size, self.grid.batch.size
        parallel = self.run.parallel
        divisor = parallel.x * parallel.y * (2 * parallel.cp if parallel.cp > 1 else 1)
        order = sorted(range(len(documents)), key=lambda number: len(documents[number]))
        mine: list[tuple[int, NDArray[np.float32]]] = []
        with scoring_head(self.model.model, self.sampling):
            for first in range(0, len(order), size * ranks):
                together = order[first : first + size * ranks]
                width = -(-(len(documents[together[-1]]) - 1) // divisor) * divisor
                here = together[self.grid.batch.rank :: ranks]
                inputs, targets = _padded([documents[number] for number in here], size, width, self.device)
                fields_5BS = self._forward(inputs, targets).cpu().numpy()
                mine += [(number, fields_5BS[:, row]) for row, number in enumerate(here)]
            self.model.free_gathered()
        return self._gather(mine, len(documents))

    def _forward(self, inputs_BS: Tensor, targets_BS: Tensor) -> Tensor:
        """The fields [5, B, S], in the order of the sequence also where cp splits it."""
        cp = self.grid.cp
        if cp.size == 1:
            return self.model.model(inputs_BS, targets_BS)
        places_1S = torch.arange(inputs_BS.shape[1], device=self.device)[None]
        mine = (take_chunks(t, cp.rank, cp.size) for t in (inputs_BS, targets_BS, places_1S))
        fields_5BS = all_gather(self.model.model(*mine), cp, 2, "audit: scores")
        order_S = torch.cat([take_chunks(places_1S, rank, cp.size)[0] for rank in range(cp.size)])
        return fields_5BS[:, :, order_S.argsort()]

    def _gather(self, mine: list[tuple[int, NDArray[np.float32]]], count: int) -> list[NDArray[np.float32]] | None:
        first_of_its_batch = self.grid.axis("y_x").rank == 0 and self.grid.cp.rank == 0
        everyone: list | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(mine if first_of_its_batch else [], everyone)
        if everyone is None:
            return None
        found = dict(pair for part in everyone for pair in part)
        return [found[number] for number in range(count)]


class HuggingFaceModel:
    """A model of the transformers library, in one process."""

    def __init__(self, name: str, device: torch.device, sampling: Sampling, micro_batch_size: int) -> None:
        transformers = import_transformers()
        try:
            self.model = transformers.AutoModelForCausalLM.from_pretrained(name).to(device).eval()
        except (OSError, ValueError) as error:
            raise UserError(f"cannot load the Hugging Face model {name}: {str(error).splitlines()[0]}") from error
        self.vocab_size = self.model.config.vocab_size
        self.max_length = getattr(self.model.config, "max_position_embeddings", None)
        self.device, self.sampling, self.micro_batch_size = device, sampling, micro_batch_size

    @torch.no_grad()
    def score(self, documents: Rows) -> list[NDArray[np.float32]]:
        order = sorted(range(len(documents)), key=lambda number: len(documents[number]))
        found: dict[int, NDArray[np.float32]] = {}
        for first in range(0, len(order), self.micro_batch_size):
            together = order[first : first + self.micro_batch_size]
            rows = [documents[number] for number in together]
            inputs, targets = _padded(rows, len(rows), len(rows[-1]) - 1, self.device)
            # Documents are padded on the right, where a causal model cannot see it.
            logits = self.model(input_ids=inputs, use_cache=False).logits
            fields = _score_in_chunks(logits.flatten(0, 1), targets.flatten(), self.sampling)
            fields_5BS = fields.unflatten(1, inputs.shape).cpu().numpy()
            found |= {number: fields_5BS[:, row] for row, number in enumerate(together)}
        return [found[number] for number in range(len(documents))]


class HuggingFaceTokenizer:
    """The tokenizer of a Hugging Face model, with the special tokens that it puts around a text."""

    fingerprint = ""

    def __init__(self, name: str) -> None:
        transformers = import_transformers()
        try:
            self._tokenizer = transformers.AutoTokenizer.from_pretrained(name)
        except (OSError, ValueError) as error:
            raise UserError(f"cannot load the tokenizer {name}: {str(error).splitlines()[0]}") from error
        self.vocab_size = len(self._tokenizer)
        self.special_ids = tuple(sorted(self._tokenizer.all_special_ids))

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return self._tokenizer(texts)["input_ids"]


def import_transformers() -> Any:
    """The transformers library, or a sentence that says how to get it."""
    try:
        import transformers
    except ImportError as error:
        raise UserError(
            "Hugging Face models need the transformers library: pip install 'fourfold[huggingface]'"
        ) from error
    transformers.utils.logging.disable_progress_bar()
    return transformers


@contextmanager
def scoring_head(model: Transformer, sampling: Sampling) -> Iterator[None]:
    """Inside, the model called with targets gives the fields [5, B, S] instead of a loss.

    The head's ``forward`` is exchanged, not the head, so that FSDP2 gathers its weights as ever.
    """
    head = model.lm_head
    assert isinstance(head, ParallelHead), type(head)
    head.forward = partial(_scored, head, sampling=sampling)
    try:
        yield
    finally:
        del head.forward


def _scored(head: ParallelHead, x_BTh: Tensor, targets_BS: Tensor, *, sampling: Sampling) -> Tensor:
    """Logits a chunk of tokens at a time, over y by tokens and over x whole, scored, and put together again."""
    x_BSh = all_gather(x_BTh, head.x, 1, "audit: tokens")
    x_Nh, targets_N = x_BSh.flatten(0, 1), targets_BS.flatten()
    size = chunk_size(x_Nh.shape[0], head.weight.shape[0] * head.x.size, head.y.size, head.chunk_logits)
    parts = []
    for begin in range(0, x_Nh.shape[0], size):
        chunk = slice(begin, min(begin + size, x_Nh.shape[0]))
        logits_mv = reduce_scatter(x_Nh[chunk] @ head.weight.T, head.y, 0, "audit: logits").float()
        logits_mV = all_gather(logits_mv, head.x, 1, "audit: logits")[:, : head.vocab_size]
        targets_m = targets_N[chunk].chunk(head.y.size)[head.y.rank]
        fields_5m = score_logits(logits_mV, targets_m, sampling)
        parts.append(all_gather(fields_5m, head.y, 1, "audit: scores"))
    return torch.cat(parts, dim=1).unflatten(1, targets_BS.shape)


def _score_in_chunks(logits_NV: Tensor, targets_N: Tensor, sampling: Sampling) -> Tensor:
    size = max(1, CHUNK_LOGITS[logits_NV.device.type] // logits_NV.shape[1])
    pairs = zip(logits_NV.split(size), targets_N.split(size), strict=True)
    return torch.cat([score_logits(logits, targets, sampling) for logits, targets in pairs], dim=1)


def _padded(documents: Rows, rows: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Inputs and targets [rows, width]: every token but the last, and every token but the first; zeros besides."""
    tokens = np.zeros((2, rows, width), dtype=np.int64)
    for row, document in enumerate(documents):
        tokens[0, row, : len(document) - 1] = document[:-1]
        tokens[1, row, : len(document) - 1] = document[1:]
    inputs, targets = torch.from_numpy(tokens).to(device)
    return inputs, targets
