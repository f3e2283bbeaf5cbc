"""Sample text from a model on the grid. Every process takes part, and no process holds the full model."""

from functools import partial

import torch

from fourfold.config.layout import attention_split
from fourfold.data.tokenizer import Tokenizer, begin_of
from fourfold.errors import UserError
from fourfold.parallel.grid.shared_failure import decided_by_rank_0
from fourfold.training.job import Job


def sample_text(job: Job, text: str, tokenizer: Tokenizer) -> str:
    """Continue ``text`` by up to ``sample.max_new_tokens`` tokens, and return the text with its continuation.

    Generation stops early at an end-of-document token. Each new token takes a forward pass over a full sequence, as in
    training. This is slow, but it works on any grid, because it needs no key-value cache.

    Args:
        job: The model on the grid, and the run file with the section [sample].
        text: The text to continue.
        tokenizer: Converts the text to tokens, and the new tokens to text.

    Raises:
        UserError: The logits are not finite.
    """
    config, run = job.run.sample, job.run
    window = run.training.seq_length
    prompt = [*begin_of(tokenizer), *tokenizer.encode_batch([text])[0]] or [tokenizer.eod_id]
    tokens, first_new = list(prompt), len(prompt)
    generator = torch.Generator().manual_seed(run.training.seed)
    # In attention, the ranks of the axis y may divide the batch's sequences. Then repeat the sequence for each rank.
    rows = run.parallel.y if attention_split(run) == "batch" else 1
    for _ in range(config.max_new_tokens):
        recent = tokens[-window:]
        padded = torch.tensor(recent + [tokenizer.eod_id] * (window - len(recent)), device=job.device)
        logits_V = job.next_token_logits(padded.expand(rows, -1), len(recent) - 1).cpu()
        # All ranks must continue with the same token. The logits of replicas may differ in the last bit, so rank 0
        # draws the token for all ranks.
        draw = partial(_draw, logits_V[: tokenizer.vocab_size], config.temperature, generator)
        token = decided_by_rank_0(draw)
        if token == tokenizer.eod_id:
            break
        tokens.append(token)
    return text + tokenizer.decode(tokens[first_new:])


def _draw(logits_V: torch.Tensor, temperature: float, generator: torch.Generator) -> int:
    """Draw a token from the logits. Temperature 0 takes the most likely token. Raise ``UserError`` if the largest logit
    is infinite or NaN."""
    if not logits_V.max().isfinite():  # If any logit is NaN, the maximum is NaN.
        raise UserError("no sample can be drawn: the model's logits are not finite; train with a smaller optimizer.lr")
    if temperature == 0:
        return int(logits_V.argmax())
    # Subtract the largest logit first. Otherwise division by a low temperature could give infinity, and then NaN. Clamp
    # the temperature, because float32 may round it to 0.
    scaled_V = (logits_V - logits_V.max()) / max(temperature, torch.finfo(torch.float32).tiny)
    return int(torch.multinomial(scaled_V.softmax(0), 1, generator=generator))
