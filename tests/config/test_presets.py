"""Presets have as many parameters as their names say."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest

from fourfold.config.parameter_counts import active_parameters_per_layer, num_parameters, parameters_per_layer
from fourfold.config.presets import PRESETS
from fourfold.errors import UserError
from fourfold.run_file.dump import to_toml
from fourfold.run_file.load import load_run, make_run

BILLIONS = {
    "gpt2": 0.124,
    "gpt2-medium": 0.355,
    "gpt2-large": 0.774,
    "gpt2-xl": 1.558,
    "llama-12m": 0.012,
    "frontier-22b": 22,
    "frontier-175b": 175,
    "frontier-1t": 1000,
    "llama3-8b": 8.03,
    "llama3-70b": 70.6,
    "llama3-405b": 406,
    "mistral-7b": 7.24,
    "gemma2-2b": 2.61,
    "mixtral-8x7b": 46.7,
    "mixtral-8x22b": 141,
    "qwen3-30b-a3b": 30.5,
    "qwen3-235b-a22b": 235,
    "qwen3-next-80b-a3b": 80,
    "qwen3.5-9b": 8.95,
    "qwen3.5-35b-a3b": 34.7,
    "olmoe-1b-7b": 6.9,
    "gpt-oss-20b": 20.91,
    "gpt-oss-120b": 116.83,
    "deepseek-v2-lite": 15.7,
    "deepseek-v3": 671,
    "kimi-k2": 1026,
    **{f"gpt-{n}b": n for n in (5, 10, 20, 40, 60, 80, 160, 320, 640)},
}
UNNAMED = {"gpt-tiny", "gpt-demo", "llama-tiny", "moe-tiny"}
BILLIONS_ACTIVE = {
    "mixtral-8x7b": 12.9,
    "mixtral-8x22b": 39,
    "qwen3-30b-a3b": 3.3,
    "qwen3-235b-a22b": 22,
    "qwen3.5-35b-a3b": 3.46,
    "olmoe-1b-7b": 1.3,
    "gpt-oss-20b": 3.61 + 0.58,  # OpenAI's numbers leave out the embedding.
    "gpt-oss-120b": 5.13 + 0.58,
    "deepseek-v2-lite": 2.4 + 0.21,
    "deepseek-v3": 37,
    "kimi-k2": 32.6,
}
"""Billions of active parameters per token, including embeddings, according to the models' authors."""


def table(model: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": model,
        "data": {"source": "python-stdlib"},
        "training": {"global_batch_size": 8, "seq_length": 128, "train_steps": 2},
    }


def test_every_preset_is_checked_here() -> None:
    assert set(PRESETS) == set(BILLIONS) | UNNAMED


@pytest.mark.parametrize(("name", "billions"), BILLIONS.items())
def test_number_of_parameters(name: str, billions: float) -> None:
    published_to_the_digit = name.startswith(
        ("gpt2", "llama3", "mistral", "gemma2", "mixtral", "qwen3", "olmoe", "gpt-oss")
    )
    count = num_parameters(make_run(table({"preset": name})).model)
    assert count / 1e9 == pytest.approx(billions, rel=0.005 if published_to_the_digit else 0.1)


@pytest.mark.parametrize(("name", "billions"), BILLIONS_ACTIVE.items())
def test_number_of_active_parameters(name: str, billions: float) -> None:
    model = make_run(table({"preset": name})).model
    idle = model.sparse_layers * (parameters_per_layer(model) - active_parameters_per_layer(model))
    assert (num_parameters(model) - idle) / 1e9 == pytest.approx(billions, rel=0.02)


@pytest.mark.parametrize("name", PRESETS)
def test_a_resolved_run_file_is_the_same_run(name: str) -> None:
    run = make_run(table({"preset": name}))
    text = to_toml(run)
    assert make_run(tomllib.loads(text)) == run
    # The saved file has every key of the model, so a preset that changes in a later version cannot change an old run.
    without_preset = tomllib.loads(text)
    del without_preset["model"]["preset"]
    assert make_run(without_preset).model == run.model.model_copy(update={"preset": None})


def test_resolved_run_file_of_odd_values(tmp_path: Any) -> None:
    odd = 'quote " backslash \\ tab \t newline \n delete \x7f control \x01 é 漢 🙂'
    run = make_run(
        {
            **table({"preset": "llama-tiny", "norm_eps": 1e-12}),
            "data": {"train": [{"path": odd, "weight": 1e22}, {"path": "b"}], "tokenizer": odd},
            "optimizer": {"lr": 5e-324, "betas": [0, 0.95]},
            "sample": {"prompt": odd},
        }
    )
    (tmp_path / "run.toml").write_text(to_toml(run), encoding="utf-8")
    assert load_run(tmp_path / "run.toml") == run


def test_own_keys_win_over_the_presets() -> None:
    run = make_run(table({"preset": "llama3-8b", "num_hidden_layers": 3, "vocab_size": 1000}))
    assert (run.model.num_hidden_layers, run.model.vocab_size, run.model.hidden_size) == (3, 1000, 4096)
    assert PRESETS["llama3-8b"]["num_hidden_layers"] == 32


@pytest.mark.parametrize(
    ("preset", "message"),
    [
        ("llama3-8", "did you mean 'llama3-8b'?"),
        ("frontier1t", "did you mean 'frontier-1t'?"),
        ("bert", "choose from gpt-tiny, "),
        (8, "choose from gpt-tiny, "),
        (["llama3-8b"], "is not a preset"),
    ],
)
def test_unknown_preset(preset: object, message: str) -> None:
    with pytest.raises(UserError) as error:
        make_run(table({"preset": preset}))
    assert message in str(error.value)
