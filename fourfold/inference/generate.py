"""Generate text, and measure the speed of the generation and the size of the key-value cache."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fourfold.data.transformers_tokenizer import AnyTokenizer
from fourfold.errors import UserError, first_line
from fourfold.huggingface.transformers_models import checked_ids, positions_of

COLDEST = 1e-6
"""Lowest allowed temperature above 0. With a lower temperature, the scaled logits would overflow float32."""
SCORE_KEYS = (
    "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff", "repetition_penalty", "encoder_repetition_penalty",
    "no_repeat_ngram_size", "bad_words_ids", "sequence_bias", "suppress_tokens", "begin_suppress_tokens",
    "exponential_decay_length_penalty", "guidance_scale", "min_length", "min_new_tokens", "remove_invalid_values",
)  # fmt: skip
"""Keys of a generation_config.json that change the probabilities of the next token."""


def check_sampling(temperature: float, top_k: int | None, top_p: float | None) -> None:
    """Raise ``UserError`` if one of these sampling options is outside its valid range."""
    if not COLDEST <= temperature < math.inf:
        raise UserError(f"--temperature {temperature} must be finite and at least {COLDEST:g}, such as 1")
    if top_k is not None and top_k < 1:
        raise UserError(f"--top-k {top_k} must be at least 1, such as 50")
    if top_p is not None and not 0 < top_p <= 1:
        raise UserError(f"--top-p {top_p} must be a probability, above 0 and at most 1, such as 0.9")


@dataclass(frozen=True)
class Sampling:
    """Settings for choosing the next token. The constructor raises ``UserError`` for invalid values."""

    temperature: float = 0.0
    """Temperature of the softmax. 0 always takes the most likely token."""
    top_k: int | None = None
    """Draw only from this many of the most likely tokens. None means all tokens."""
    top_p: float | None = None
    """Draw only from the smallest set of most likely tokens whose probabilities add up to at least this number. None
    means all tokens."""
    seed: int = 0
    """Seed of the random draws."""

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**64:
            raise UserError(f"--seed {self.seed} must be at least 0 and below 2^64, such as 0")
        for option, value in (("--top-k", self.top_k), ("--top-p", self.top_p)):
            if self.temperature == 0 and value is not None:
                raise UserError(f"{option} {value} needs --temperature, such as --temperature 1")
        check_sampling(self.temperature or 1.0, self.top_k, self.top_p)

    def settings(self, model: Any) -> dict[str, Any]:
        """Return the settings in effect as a dict, with transformers' names.

        The texts that stop generation come from the model's generation_config.json. If the temperature is above 0, the
        settings that change probabilities (``SCORE_KEYS``) come from this file too. Temperature 0 takes the most likely
        token, so these settings must not apply.
        """
        theirs = model.generation_config.to_diff_dict()
        stops = {key: theirs[key] for key in ("stop_strings",) if theirs.get(key)}
        if self.temperature == 0:
            return {"do_sample": False, **stops}
        kept = {key: theirs[key] for key in SCORE_KEYS if theirs.get(key) is not None}
        own = {"temperature": self.temperature, "top_k": self.top_k or 0, "top_p": self.top_p or 1.0}
        return {"do_sample": True, **own, **kept, **stops}


@dataclass(frozen=True)
class Generation:
    """A generated text, the speed of the generation, and the size of the cache."""

    text: str
    prompt_tokens: int
    new_tokens: int
    prompt_seconds: float
    """Number of seconds from the start of the generation to the first new token."""
    tokens_per_second: float | None
    """Number of tokens per second after the first new token. None if there is only one new token."""
    cache_bytes: int | None
    """Size of the whole cache after the last token, in bytes. None for a model without a cache."""
    settings: dict[str, Any]
    """The settings in effect (``Sampling.settings``), with transformers' names."""


class _Streamer:
    """A transformers streamer that shows new text in complete characters and records the time of each token."""

    def __init__(self, tokenizer: AnyTokenizer, show: Callable[[str], None]) -> None:
        self.tokenizer, self.show = tokenizer, show
        self.ids: list[int] = []
        self.shown = ""
        self.times: list[float] = []
        self._saw_prompt = False

    def put(self, ids: Tensor) -> None:
        if not self._saw_prompt:
            self._saw_prompt = True
            return
        self.times.append(time.perf_counter())
        self.ids += ids.flatten().tolist()
        text = self.tokenizer.decode(self.ids)
        # If the last character is incomplete, wait for the next token.
        if not text.endswith("\ufffd"):
            self._show_up_to(text)

    def end(self) -> None:
        self._show_up_to(self.tokenizer.decode(self.ids))

    def _show_up_to(self, text: str) -> None:
        if text.startswith(self.shown):
            self.show(text[len(self.shown) :])
            self.shown = text


def generate(
    model: Any,
    tokenizer: AnyTokenizer,
    prompt: str,
    max_new_tokens: int,
    sampling: Sampling,
    show: Callable[[str], None] = lambda text: None,
    shows_prompt: bool = True,
) -> Generation:
    """Continue a prompt.

    The end tokens, the texts that stop generation, and the key use_cache come from the model's generation_config.json.
    If the temperature is above 0, the settings that change the probabilities of tokens (``SCORE_KEYS``) come from this
    file too. This function ignores all other settings in the file. Settings for several sequences have no effect,
    because this function streams a single sequence.

    Args:
        model: A transformers model, or a fourfold model with the same interface.
        tokenizer: The model's tokenizer.
        prompt: The text to continue.
        max_new_tokens: Largest number of tokens to generate.
        sampling: How to draw the next token.
        show: Receives the prompt, and then each piece of new text.
        shows_prompt: Whether ``show`` receives the prompt.

    Returns:
        The new text, the speed of the generation, and the size of the cache.

    Raises:
        UserError: ``encode_prompt`` refuses the prompt, ``max_new_tokens`` is below 1, the model has too few positions,
            or transformers refuses a setting of generation_config.json.
    """
    from fourfold.inference.loki import cache_bytes

    ids = encode_prompt(model, tokenizer, prompt)
    _check_length(model, len(ids), max_new_tokens)
    if shows_prompt:
        show(prompt)
    stream = _Streamer(tokenizer, show)
    tokens = torch.tensor([ids], device=model.device)
    torch.manual_seed(sampling.seed)
    ends, settings = _ends(model, tokenizer), sampling.settings(model)
    begin = time.perf_counter()
    out = _continued(model, tokens, stream, max_new_tokens, ends, settings)
    times = stream.times
    # Before version 5.24, transformers used the name past_key_values.
    cache = out.cache if hasattr(out, "cache") else out.past_key_values
    return Generation(
        text=tokenizer.decode(stream.ids),
        prompt_tokens=len(ids),
        new_tokens=len(stream.ids),
        prompt_seconds=times[0] - begin,
        tokens_per_second=(len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else None,
        cache_bytes=cache_bytes(cache),
        settings=settings,
    )


def _continued(
    model: Any, tokens: Tensor, stream: _Streamer, max_new_tokens: int, ends: list[int] | None, settings: dict[str, Any]
) -> Any:
    """Call transformers' ``generate`` with these arguments. Of the model's own settings, use only ``use_cache``."""
    theirs, texts = model.generation_config, settings.get("stop_strings")
    try:
        own = type(theirs)(
            max_new_tokens=max_new_tokens,
            return_dict_in_generate=True,
            use_cache=theirs.use_cache,
            # A single sequence is never padded, but transformers warns if there is no id for padding.
            pad_token_id=(ends or [0])[0],
            eos_token_id=ends,
            **{key: value for key, value in settings.items() if key != "stop_strings"},
        )
        # Replace the model's generation configuration too, because transformers would take missing values from there.
        model.generation_config = own
        return model.generate(
            tokens,
            own,
            attention_mask=torch.ones_like(tokens),
            streamer=stream,
            stopping_criteria=[partial(_stops, stream, texts)] if texts else [],
        )
    except (ValueError, TypeError) as error:
        raise UserError(f"cannot generate with the settings {settings}: {first_line(error)}") from error
    finally:
        model.generation_config = theirs


def _stops(stream: _Streamer, texts: str | Sequence[str], ids: Tensor, scores: Any, **more: Any) -> Tensor:
    """Return whether the new text contains one of ``texts``. This function is a stopping criterion for transformers.

    transformers' own criterion needs a transformers tokenizer, but ``stream`` may have one of fourfold's tokenizers.
    """
    new = stream.tokenizer.decode(stream.ids)
    done = any(text in new for text in ([texts] if isinstance(texts, str) else texts))
    return torch.full((len(ids),), done, device=ids.device)


def encode_prompt(model: Any, tokenizer: AnyTokenizer, prompt: str) -> list[int]:
    """Tokenize a prompt.

    Raises:
        UserError: The prompt is not valid UTF-8, has no tokens, or has token ids that the model does not have.
    """
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(f"the prompt is not UTF-8: {error.reason} at character {error.start}; use iconv") from None
    ids = checked_ids(model, tokenizer.encode_batch([prompt])[0])
    if not ids:
        raise UserError(
            "the prompt is empty, and this model has no token to begin with; give some text, such as --prompt Once"
        )
    return ids


def _check_length(model: Any, prompt: int, new: int) -> None:
    """Raise ``UserError`` if ``new`` is below 1, or if the prompt and its continuation exceed the model's positions."""
    if new < 1:
        raise UserError(f"--max-new-tokens {new} must be at least 1")
    positions = positions_of(model)
    if positions is not None and prompt + new > positions:
        raise UserError(
            f"the prompt's {prompt} tokens and {new} new tokens exceed the model's {positions} positions; give a "
            f"shorter prompt, or --max-new-tokens {max(1, positions - prompt)}"
        )


def _ends(model: Any, tokenizer: AnyTokenizer) -> list[int] | None:
    """Return the ids that end a text: the model's ids, or the tokenizer's id if the model names none. Skip ids outside
    the model's vocabulary. Return None if no id is left."""
    own = model.generation_config.eos_token_id
    own = tokenizer.eod_id if own is None else own
    ids = own if isinstance(own, list) else [own]
    return [
        token
        for token in ids
        if isinstance(token, int) and 0 <= token < model.config.get_text_config(decoder=True).vocab_size
    ] or None
