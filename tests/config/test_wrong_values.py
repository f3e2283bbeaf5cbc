"""Every key of the run file, with wrong values. The refusal names the key and the value, and the value that it suggests
works."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel

from fourfold.config.expected_values import section_of, shown
from fourfold.config.run import RunConfig
from fourfold.errors import UserError
from fourfold.parsing import parse_toml
from fourfold.run_file.load import make_run

WRONG = ("", "zzz", -3, 2.5, 10**30, math.nan, True, [], ["zzz"], {"zzz": 1})
"""Some of these values are wrong for every key: they have another type, are out of bounds, or are not among the
choices."""
SECTIONS: dict[str, dict[str, Any]] = {
    "model": {"preset": "llama-tiny", "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "data": {"train": [{"path": "c"}], "validation": [{"path": "c"}]},
    "training": {"global_batch_size": 8, "seq_length": 128, "train_steps": 2},
    "optimizer": {"groups": [{"parameters": ["*"], "lr_ratio": 0.5}]},
    "masks": {"goldfish": {}},
}
Path = tuple[str | int, ...]


def every_key(schema: type[BaseModel], path: Path = ()) -> Iterator[Path]:
    """Yield the path of each key of a schema. In a list of tables, the first item stands for all items."""
    for name, field in schema.model_fields.items():
        yield (*path, name)
        if (section := section_of(field.annotation)) is not None:
            is_list = isinstance(value_at(SECTIONS, (*path, name)), list)
            yield from every_key(section, (*path, name, 0) if is_list else (*path, name))


def value_at(tables: Any, path: Path) -> Any:
    for part in path:
        tables = tables[part] if isinstance(part, int) else tables.get(part, {})
    return tables


def changed(tables: Any, path: Path, value: object) -> Any:
    """Return a copy of the tables with another value at a path."""
    if not path:
        return value
    if isinstance(tables, list):
        return [changed(tables[0], path[1:], value)]
    return {**tables, path[0]: changed(tables.get(path[0], {}), path[1:], value)}


def refusal(tables: dict[str, Any]) -> str | None:
    try:
        make_run(tables)
    except UserError as error:
        return str(error)
    return None


def suggestions(sentence: str) -> list[Any]:
    """Return the values that a refusal suggests: after "such as", in quotes after "must be", or true and false."""
    wanted = re.split(r": must be |is not a preset; ", sentence)[-1]
    if found := re.search(r"such as (.+?)(?: \(and \d+ more mistakes?\))?$", wanted):
        return [parse_toml(f"value = {found[1]}")["value"]]
    choices = re.findall(r"'[\w-]+'|\b\d+\b|\btrue\b|\bfalse\b", wanted)
    return [parse_toml(f"value = {choice}")["value"] for choice in choices] or re.findall(r"[\w-]+", wanted)


ALL = [path for path in every_key(RunConfig) if path != ("model", "from_hf")]  # from_hf would ask the Hub


@pytest.mark.parametrize("path", ALL, ids=lambda path: ".".join(map(str, path)))
def test_a_wrong_value_is_refused_with_one_that_works(path: Path) -> None:
    key, refused, checked = ".".join(map(str, path)), 0, list[Any]()
    for wrong in WRONG:
        sentence = refusal(changed(SECTIONS, path, wrong))
        if sentence is None or "unknown key" in sentence or f"{key} = " not in sentence.partition(": must be ")[0]:
            # The value is valid, or another key contradicts it.
            continue
        refused += 1
        assert "\n" not in sentence and "nput should" not in sentence, sentence
        assert re.search(f"{key} = ({re.escape(shown(wrong))}|1e.30)", sentence), sentence
        if ": must be " not in sentence:
            assert re.search("works|leave|such as|there are|choose", sentence), sentence
            continue
        assert suggestions(sentence), sentence
        for value in (value for value in suggestions(sentence) if value not in checked):
            checked.append(value)
            after = refusal(changed(SECTIONS, path, [value] if "must be a list of '" in sentence else value)) or ""
            assert f"{key} = " not in after.partition(": must be ")[0] or ": must be" not in after, (sentence, after)
    assert refused > 1


@pytest.mark.parametrize(
    ("path", "wrong", "sentence"),
    [
        (("optimizer", "lr"), -1, "optimizer.lr = -1: must be a number > 0, such as 0.0003"),
        (("optimizer", "lr"), "3e-3", "optimizer.lr = '3e-3': must be a number > 0, such as 0.003"),
        (("training", "train_steps"), 0, "training.train_steps = 0: must be an integer > 0, such as 1000"),
        (("training", "train_steps"), 20.0, "training.train_steps = 20.0: must be an integer > 0, such as 20"),
        (("data", "train"), "c/b", "data.train = 'c/b': must be a list of tables, such as [{ path = 'c/b' }]"),
        (("data", "train"), ["c/b"], "data.train.0 = 'c/b': must be a table, such as { path = 'c/b' }"),
        (("optimizer", "betas"), [0.8, 1, True],
         "optimizer.betas = [0.8, 1, true]: must be a list of 2 numbers, such as "
         "[0.9, 0.95]"),
        (("model",), 3, "model = 3: must be a table, such as { preset = 'gpt2' }"),
        (("moe",), 3, "moe = 3: must be a table, such as { capacity_factor = 0.0, load_balancing_loss = 0.0, z_loss = "
         "0.0, bias_update_rate = 0.0 }"),
        (("lora", "targets"), "q_proj",
         "lora.targets = 'q_proj': must be a list of 'q_proj', 'k_proj', 'v_proj', 'o_proj', "
         "'gate_proj', 'up_proj', 'down_proj', 'q_a_proj', 'kv_a_proj', 'q_nope_proj', 'q_rope_proj', 'k_nope_proj', "
         "'k_rope_proj', 'z_proj', 'b_proj' or 'a_proj', not empty, such as ['q_proj']"),
        (("training", "seed"), 2**63,
         "training.seed = 9223372036854775808: must be an integer ≥ 0 and < 2^63, such as 0"),
    ],
)  # fmt: skip
def test_a_near_miss_gets_the_value_that_was_meant(path: Path, wrong: object, sentence: str) -> None:
    assert refusal(changed(SECTIONS, path, wrong)) == f"the run: {sentence}"


def test_a_missing_key_gets_a_suggested_value() -> None:
    del (training := dict(SECTIONS["training"]))["seq_length"]
    assert refusal({**SECTIONS, "training": training}) == (
        "the run: 'training.seq_length' is missing; it must be an integer > 0 and ≤ 2^31, such as 1024"
    )
    assert refusal({"data": {}, "training": {}}) == (
        "the run: 'model' is missing; it must be a table, such as { preset = 'gpt2' } (and 4 more mistakes)"
    )
