"""A sample of text from a model that is on the grid: every process takes part, no process holds the model."""

from __future__ import annotations

import torch
import torch.distributed as dist

from fourfold.config.layout import attention_split
from fourfold.data.tokenizer import Tokenizer
from fourfold.training.job import Job


def sample_text(job: Job, tokenizer: Tokenizer) -> str:
    """Continue ``sample.prompt`` by ``sample.max_new_tokens``, or to the end of the document.

    The whole window is run for every token, as training runs it: no cache, but any layout.
    """
    config, run = job.run.sample, job.run
    window = run.training.seq_length
    prompt = tokenizer.encode_batch([config.prompt])[0] or [tokenizer.eod_id]
    tokens, first_new = list(prompt), len(prompt)
    generator = torch.Generator().manual_seed(run.training.seed)
    # Where y shares out the sequences of a batch, there must be one for each of its ranks.
    rows = run.parallel.y if attention_split(run.model, run.parallel, run.training) == "batch" else 1
    for _ in range(config.max_new_tokens):
        recent = tokens[-window:]
        padded = torch.tensor(recent + [tokenizer.eod_id] * (window - len(recent)), device=job.device)
        logits_V = job.next_token_logits(padded.expand(rows, -1), len(recent) - 1).cpu()
        token = _same_everywhere(_draw(logits_V[: tokenizer.vocab_size], config.temperature, generator), job.device)
        if token == tokenizer.eod_id:
            break
        tokens.append(token)
    return config.prompt + tokenizer.decode(tokens[first_new:])


def _same_everywhere(token: int, device: torch.device) -> int:
    """Rank 0's token: logits of replicas may differ in the last bit, and all must stop at the same one."""
    drawn = torch.tensor(token, device=device)
    dist.broadcast(drawn, src=0)
    return int(drawn)


def _draw(logits_V: torch.Tensor, temperature: float, generator: torch.Generator) -> int:
    """A token from the logits: the likeliest at temperature 0."""
    if temperature == 0:
        return int(logits_V.argmax())
    scaled_V = (logits_V - logits_V.max()) / temperature  # no temperature is so low that this overflows to NaN
    return int(torch.multinomial(scaled_V.softmax(0), 1, generator=generator))
