"""List the parts of a run file that parity replaces or ignores. Nothing here imports torch."""

from typing import Any, Literal

from fourfold.config.run import RunConfig
from fourfold.parsing import dotted_keys
from fourfold.verification.random_corpora import can_write

Against = Literal["plain", "transformers"]

COMPARED = (
    *("model", "parallel", "overlap", "activation_checkpoint", "training", "optimizer", "lr_scheduler", "lora", "moe"),
    *("ema.decay", "dpo.beta", "masks.goldfish", "data.mask_documents", "data.format", "loss_scaling.initial"),
)
"""Sections and keys that parity tests. If parity replaces the value of a key, it tests the replacement."""

WITHOUT_NUMBERS = ("name", "output_dir", "metrics", "fault_tolerance", "data.source", "data.train", "data.cache_dir")
"""Sections and keys that parity's report does not mention. Most of them do not change the results of training. The
paths of the data do change the results, but the report has a separate sentence about the data (see ``ALWAYS``)."""

ALWAYS = {"data": "parity trains on random tokens in the format of this data, and never reads the data itself"}
REASONS = {
    "validation": "parity validates after every step, and does not stop or keep the best checkpoint",
    "checks": "parity drops one step, but does not look for bad steps",
}
FROM_RANDOM = "parity trains from random weights; --against transformers also compares the imported model"
SMALL_VOCABULARY = "the vocabulary is too small for parity's conversations, so the trainer does not read any"


_TYPES = ("precision", "master_weights", "reduce_dtype")
OWN_TYPES = ("optimizer.stochastic_rounding", *(f"training.{name}" for name in _TYPES))
"""Keys that choose dtypes. Parity replaces them in its comparison in float32, and keeps them in its comparison in the
run file's own dtypes."""


def in_own_types(run: RunConfig) -> bool:
    """Return whether parity also makes a comparison in the run file's own dtypes.

    Parity makes no such comparison in these cases:

    - The run file's precision is fp32, so the comparison in float32 is enough.
    - The run computes in float8, which one process cannot emulate.
    - Each token goes to only some of the experts. Rounding changes which experts a router chooses.
    - LoRA is trained with Muon. While B is zero, the gradient of A is only rounding noise, and Muon turns this noise
      into full steps.
    """
    chooses = run.model.num_experts > run.model.num_experts_per_tok
    is_noise = run.lora.rank > 0 and run.optimizer.name == "muon"
    return run.training.precision != "fp32" and run.training.float8 == "none" and not (chooses or is_noise)


def not_compared(run: RunConfig, verified: RunConfig, against: Against = "plain") -> dict[str, str]:
    """List the sections and keys of the run file that parity does not compare, with reasons.

    Args:
        run: The run as in the run file.
        verified: The run as parity runs it.
        against: The reference model: "plain" or "transformers".

    Returns:
        A map from keys and sections to reasons. The map always has the section [data]. It also has each key whose value
        parity replaces, and each key or section that is not at its default but has no effect in parity.
    """
    found, replaced = dict(ALWAYS), dict(dotted_keys(verified.model_dump()))
    if not can_write(run):
        found["data.format"] = SMALL_VOCABULARY
    if run.model.from_hf is not None and against == "plain":
        found["model.from_hf"] = FROM_RANDOM
    own = dict(dotted_keys(run.model_dump()))
    for key, value in dotted_keys(run.model_dump(exclude_defaults=True)):
        section = key.partition(".")[0]
        name = section if section in REASONS else key
        if name in REASONS:
            found[name] = REASONS[name]
        elif not _is_in(key, (*COMPARED, *WITHOUT_NUMBERS)):
            found[key] = f"{_shown(value)} has no effect in parity"
    for key, value in own.items():
        if replaced[key] != value and not (key in OWN_TYPES and in_own_types(run)):
            found[key] = f"parity runs with {_shown(replaced[key])} in place of {_shown(value)}"
    return found


def _is_in(key: str, places: tuple[str, ...]) -> bool:
    return any(key == place or key.startswith(place + ".") for place in places)


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)
