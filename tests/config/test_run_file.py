"""The run file is strict: every mistake gives one sentence that says where the mistake is and what would be right."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

from fourfold.config.model import ModelConfig
from fourfold.config.rope_scaling import RopeScaling
from fourfold.config.run import RunConfig
from fourfold.errors import UserError
from fourfold.run_file.load import NAMES_ELSEWHERE, load_run, make_run

FILE = """
[model]
preset = "llama-tiny"
[data]
source = "python-stdlib"
[training]
global_batch_size = 8
seq_length = 128
train_steps = 2
"""


def table(**sections: Any) -> dict[str, Any]:
    """Return the tables of FILE with changes. A changed section is merged into the section of FILE, any other value
    replaces the value in FILE, and None removes the key."""
    result: dict[str, Any] = {
        "model": {"preset": "llama-tiny"},
        "data": {"source": "python-stdlib"},
        "training": {"global_batch_size": 8, "seq_length": 128, "train_steps": 2},
    }
    for name, value in sections.items():
        result[name] = {**result.get(name, {}), **value} if isinstance(value, dict) else value
    return {name: value for name, value in result.items() if value is not None}


def refusal(run: dict[str, Any]) -> str:
    with pytest.raises(UserError) as error:
        make_run(run)
    sentence = str(error.value)
    assert "\n" not in sentence
    return sentence


def own_data(**corpus: Any) -> dict[str, Any]:
    run = table()
    run["data"] = {"train": [{"path": "a", **corpus}]}
    return run


def test_the_smallest_run_file(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(FILE)
    run = load_run(tmp_path / "run.toml")
    assert run == make_run(table())
    assert (run.parallel.world_size, run.gradient_accumulation_steps, run.model.num_key_value_heads) == (1, 8, 4)
    assert run.model.head_dim == 8


@pytest.mark.parametrize(
    ("wrong", "key", "hint"),
    [
        # Misspelled names at every level.
        ({"optimiser": {}}, "optimiser", "did you mean 'optimizer'?"),
        ({"training": {"seq_lenght": 1}}, "training.seq_lenght", "did you mean 'training.seq_length'?"),
        ({"parallel": {"Z": 1}}, "parallel.Z", "choose from x, y, z, dp, cp, pp, ep, zero"),
        ({"data": {"shuffle": True}}, "data.shuffle", "choose from format, train, validation, source, tokenizer"),
        (
            {"training": {"interval": 1}},
            "training.interval",
            "did you mean 'checkpoint.interval' or 'validation.interval' or 'evaluation.interval' or 'audit.interval'?",
        ),
        (
            {"model": {"rope_scaling": {"rope_type": "linear", "factr": 2.0}}},
            "model.rope_scaling.factr",
            "did you mean 'model.rope_scaling.factor'?",
        ),
        # Keys in the wrong section. The message names the right section, even if the wrong section has a key with a
        # similar spelling.
        ({"training": {"lr": 1.0}}, "training.lr", "did you mean 'optimizer.lr'?"),
        ({"training": {"warmup_steps": 1}}, "training.warmup_steps", "did you mean 'lr_scheduler.warmup_steps'?"),
        ({"model": {"seq_length": 1}}, "model.seq_length", "did you mean 'training.seq_length'?"),
        ({"train_steps": 1}, "train_steps", "did you mean 'training.train_steps'?"),
        ({"training": {"zero": 1}}, "training.zero", "did you mean 'parallel.zero'?"),
        # Names that are similar to no other name.
        ({"qqq": 1}, "qqq", "choose from name, output_dir, model, data"),
        ({"checkpoint": {"qqq": 1}}, "checkpoint.qqq", "choose from interval, save_last"),
    ],
)
def test_unknown_key(wrong: dict[str, Any], key: str, hint: str) -> None:
    sentence = refusal(table(**wrong))
    assert f"unknown key '{key}'; {hint}" in sentence


def test_unknown_key_of_a_corpus() -> None:
    assert "unknown key 'data.train.0.wieght'; did you mean 'data.train.weight'?" in refusal(own_data(wieght=1.0))


def test_unknown_key_is_told_before_other_mistakes() -> None:
    sentence = refusal(table(training={"train_steps": -1, "bogus": 1, "seed": "a"}))
    assert "unknown key 'training.bogus'" in sentence
    assert sentence.endswith("(and 2 more mistakes)")


@pytest.mark.parametrize(
    ("ours", "theirs"), [(ours, name) for ours in NAMES_ELSEWHERE for name in NAMES_ELSEWHERE[ours]]
)
def test_names_of_other_frameworks(ours: str, theirs: str) -> None:
    assert f"unknown key 'training.{theirs}'; here it is called {ours}" in refusal(table(training={theirs: 1}))


def test_names_of_other_frameworks_lead_to_keys_that_exist() -> None:
    for ours in NAMES_ELSEWHERE:
        for place in ours.replace(" (and y)", "").split(" or "):
            section, key = place.split(".")
            annotation = RunConfig.model_fields[section].annotation
            assert key in annotation.model_fields, place  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("wrong", "place"),
    [
        ({"optimizer": {"lr": math.nan}}, "optimizer.lr = nan"),
        ({"optimizer": {"lr": math.inf}}, "optimizer.lr = inf"),
        ({"optimizer": {"lr": "3e-4"}}, "optimizer.lr = '3e-4'"),
        ({"optimizer": {"lr": 0}}, "optimizer.lr = 0"),
        ({"optimizer": {"lr": -1e-3}}, "optimizer.lr = -0.001"),
        ({"optimizer": {"lr": True}}, "optimizer.lr = true: must be a number > 0, such as 0.0003"),
        ({"optimizer": {"betas": [0.9, math.nan]}}, "optimizer.betas.1 = nan"),
        ({"optimizer": {"betas": [0.9, "0.95"]}}, "optimizer.betas.1 = '0.95'"),
        ({"optimizer": {"betas": [0.9]}}, "optimizer.betas"),
        ({"optimizer": {"betas": [0.9, 0.95, 0.99]}}, "optimizer.betas"),
        ({"optimizer": {"betas": [0.9, 1.0]}}, "betas = [0.9, 1.0] must both be at least 0 and below 1"),
        ({"optimizer": {"weight_decay": math.nan}}, "optimizer.weight_decay = nan"),
        ({"optimizer": {"max_grad_norm": 0.0}}, "optimizer.max_grad_norm = 0.0"),
        ({"training": {"train_steps": 2.0}}, "training.train_steps = 2.0"),
        ({"training": {"train_steps": "2"}}, "training.train_steps = '2'"),
        ({"training": {"train_steps": True}}, "training.train_steps = true: must be an integer > 0, such as 1000"),
        ({"training": {"train_steps": 0}}, "training.train_steps = 0"),
        ({"training": {"seed": 2**63}}, "training.seed = 9223372036854775808"),
        ({"training": {"seed": -1}}, "training.seed = -1"),
        ({"training": {"precision": "fp8"}}, "training.precision = 'fp8': must be 'fp32', 'bf16' or 'fp16'"),
        ({"training": {"compile": 1}}, "training.compile = 1"),
        (
            {"training": {"master_weights": "bf16"}},
            "master_weights = 'bf16' needs training.precision = 'bf16', but it is 'fp32'",
        ),
        ({"training": {"reduce_dtype": "bf16"}}, "must be 'fp32' or training.precision = 'fp32'"),
        ({"optimizer": {"stochastic_rounding": True}}, "needs training.master_weights = 'bf16'"),
        ({"activation_checkpoint": {"offload": True}}, "offload = true needs mode = 'full'"),
        ({"parallel": {"x": 0}}, "parallel.x = 0"),
        ({"parallel": {"x": True}}, "parallel.x = true: must be an integer ≥ 1 and ≤ 2^20, such as 1"),
        ({"parallel": {"zero": 4}}, "parallel.zero = 4"),
        ({"lr_scheduler": {"decay_style": "cosin"}}, "lr_scheduler.decay_style = 'cosin'"),
        ({"lr_scheduler": {"min_lr_ratio": 1.5}}, "lr_scheduler.min_lr_ratio = 1.5"),
        ({"lr_scheduler": {"decay_ratio": 0.0}}, "lr_scheduler.decay_ratio = 0.0"),
        ({"activation_checkpoint": {"mode": "partial"}}, "activation_checkpoint.mode = 'partial'"),
        ({"activation_checkpoint": {"modules": ["attention", "moe"]}}, "activation_checkpoint.modules.1 = 'moe'"),
        ({"checkpoint": {"interval": -1}}, "checkpoint.interval = -1"),
        ({"sample": {"temperature": -0.1}}, "sample.temperature = -0.1"),
        ({"data": {"train": [{"path": "a"}]}}, "give either data.train (corpora) or data.source"),
        ({"data": {"source": None}}, "give either data.train (corpora) or data.source"),
        ({"data": {"source": "wikipedia"}}, "data.source = 'wikipedia'"),
        ({"data": {"train": "corpus"}}, "data.train = 'corpus'"),
        ({"name": "../elsewhere"}, "name = '../elsewhere'"),
        ({"name": ".."}, "name = '..'"),
        ({"name": "."}, "name = '.'"),
        ({"name": ""}, "name = ''"),
        ({"name": "a\n"}, "name = 'a\\n'"),
        ({"model": "llama-tiny"}, "model = 'llama-tiny'"),
        ({"training": 3}, "training = 3"),
        ({"model": {"hidden_size": 65}}, "hidden_size = 65 is not a multiple of num_attention_heads = 8"),
        (
            {"model": {"num_key_value_heads": 3}},
            "num_key_value_heads = 3 does not divide model.num_attention_heads = 8; num_key_value_heads = 1 works",
        ),
        (
            {"model": {"num_key_value_heads": 16}},
            "num_key_value_heads = 16 does not divide model.num_attention_heads = 8; num_key_value_heads = 8 works",
        ),
        ({"model": {"head_dim": 9}}, "head_dim = 9 gives 9 channels"),
        ({"model": {"rope_scaling": {"factor": 2.0}}}, "'model.rope_scaling.rope_type' is missing"),
        (
            {"model": {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}},
            "rope_type = 'yarn' needs original_max_position_embeddings",
        ),
        (
            {
                "model": {
                    "rope_scaling": {
                        "rope_type": "llama3",
                        "factor": 8.0,
                        "original_max_position_embeddings": 8192,
                        "low_freq_factor": 4.0,
                    }
                }
            },
            "low_freq_factor = 4.0 must be below high_freq_factor = 4.0",
        ),
        (
            {"model": {"position_embedding": "learned", "rope_scaling": {"rope_type": "linear", "factor": 2.0}}},
            "model.rope_scaling = { rope_type = 'linear', factor = 2.0 } has no effect with model.position_embedding",
        ),
    ],
)
def test_wrong_value(wrong: dict[str, Any], place: str) -> None:
    assert place in refusal(table(**wrong))


@pytest.mark.parametrize("weight", [math.nan, 0.0, -1.0, "1"])
def test_wrong_weight_of_a_corpus(weight: object) -> None:
    assert f"data.train.0.weight = {weight!r}" in refusal(own_data(weight=weight))


@pytest.mark.parametrize("section", ["model", "data", "training"])
def test_missing_section(section: str) -> None:
    assert f"'{section}' is missing" in refusal(table(**{section: None}))


def test_missing_key() -> None:
    run = table()
    del run["training"]["seq_length"]
    assert "'training.seq_length' is missing" in refusal(run)
    assert "'model.vocab_size' is missing" in refusal({**table(), "model": {}})


def test_files_that_are_not_run_files(tmp_path: Path) -> None:
    for content, message in (
        (b"x = = 2\n", "is not valid TOML: "),
        (b"name = 'a'\nname = 'b'\n", "is not valid TOML: "),
        (b"name = '\xff'", "is not text in UTF-8 (byte 8); convert it with iconv, or give a TOML file"),
        (b"", "'model' is missing"),
    ):
        (tmp_path / "run.toml").write_bytes(content)
        with pytest.raises(UserError, match=re.escape(message)) as error:
            load_run(tmp_path / "run.toml")
        assert str(tmp_path / "run.toml") in str(error.value)
        assert "\n" not in str(error.value)
    with pytest.raises(UserError, match=r"the run file .*none\.toml cannot be read: No such file"):
        load_run(tmp_path / "none.toml")
    with pytest.raises(UserError, match=r"the run file .* cannot be read: it is not a file, but a folder"):
        load_run(tmp_path)


def overridden(tmp_path: Path, *overrides: str) -> RunConfig:
    (tmp_path / "run.toml").write_text(FILE)
    return load_run(tmp_path / "run.toml", overrides)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.shuffle=true", "--set data.shuffle=true: unknown key 'data.shuffle'; choose from "),
        (
            "model.layers=3",
            "--set model.layers=3: unknown key 'model.layers'; here it is called model.num_hidden_layers",
        ),
        ("parallel.x=0", "--set parallel.x=0: parallel.x = 0: "),
    ],
)
def test_a_wrong_override_is_not_blamed_on_the_file(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(UserError, match=f"^{re.escape(message)}"):
        overridden(tmp_path, "parallel.x=2", "parallel.z=1", override)


def test_overrides(tmp_path: Path) -> None:
    run = overridden(
        tmp_path,
        "name=other",
        "parallel.x=2",
        "optimizer.lr=1e-2",
        "optimizer.betas=[0.8, 0.9]",
        'sample.prompt="1"',
        "training.precision=bf16",
        "training.compile = true",
        "checkpoint.resume = runs/a=b",
        "training.train_steps=7",
        "training.train_steps=9",
        'model.rope_scaling={rope_type="linear",factor=2}',
    )
    assert (run.name, run.parallel.x, run.optimizer.lr, run.optimizer.betas) == ("other", 2, 1e-2, (0.8, 0.9))
    assert (run.sample.prompt, run.training.precision, run.training.compile) == ("1", "bf16", True)
    assert (run.checkpoint.resume, run.training.train_steps) == ("runs/a=b", 9)
    assert run.model.rope_scaling is not None
    assert run.training.seq_length == 128


def test_a_presets_scaling_is_changed_in_part_or_taken_away() -> None:
    training = {"global_batch_size": 1, "seq_length": 8, "train_steps": 1}
    table = {"training": training, "data": {"source": "python-stdlib"}}

    def scaling(**own: object) -> RopeScaling | None:
        return make_run({"model": {"preset": "llama3-8b", "rope_scaling": own}, **table}).model.rope_scaling

    given = scaling()
    assert given is not None and given.rope_type == "llama3"
    assert scaling(factor=16.0) == given.model_copy(update={"factor": 16.0})
    assert scaling(rope_type="linear", factor=2.0) == RopeScaling(rope_type="linear", factor=2.0)
    assert scaling(rope_type="default") is None
    with pytest.raises(UserError, match=r"rope_scaling.factor' is missing"):
        scaling(rope_type="linear")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("parallel.x", "write it as section.key=value"),
        ("=2", "write it as section.key=value"),
        ("", "write it as section.key=value"),
        ("parallel.=2", "write it as section.key=value"),
        ("parallel.x=two", "parallel.x = 'two'"),
        ("parallel.x=", "parallel.x = ''"),
        ("parallel.w=2", "unknown key 'parallel.w'"),
        ("paralel.x=2", r"^--set paralel.x=2: unknown key 'paralel'; did you mean 'parallel'\?"),
        ("training=3", "training = 3: must be a table, such as { global_batch_size = 32, "),
        ("training.train_steps=1.5", "training.train_steps = 1.5: must be an integer > 0, such as 1000"),
        ("data.train=3", "data.train = 3: must be a list"),
        ("optimizer.lr=fast", "optimizer.lr = 'fast': must be a number"),
        ("data.mask_documents=maybe", "data.mask_documents = 'maybe': must be true or false"),
        ("name=../x", r"name = '../x': must consist of letters, digits"),
        ("training.seed.deep=2", "training.seed"),
        ("model.preset.deep=2", "model.preset is a key, not a section; give its value"),
        ("optimizer.lr=nan", "optimizer.lr = nan"),
    ],
)
def test_wrong_override(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        overridden(tmp_path, override)


def test_vocabulary_is_padded_alike_on_every_grid() -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    for vocab, multiple, padded in ((257, 128, 384), (256, 128, 256), (1, 128, 128), (257, 1, 257)):
        model = ModelConfig(vocab_size=vocab, pad_vocab_size_to_multiple_of=multiple, **sizes)
        assert model.padded_vocab_size == padded


def test_canaries_longer_than_what_the_model_sees() -> None:
    wanted = {"interval": 1, "documents": "c.jsonl", "suffix": 129}
    assert "audit.suffix = 129 is more than training.seq_length = 128" in refusal(table(audit=wanted))
    make_run(table(audit=wanted | {"suffix": 128}))


def test_a_weight_of_multi_token_prediction_needs_its_layers() -> None:
    wanted = "training.mtp_loss_weight = 0.3 needs model.num_nextn_predict_layers > 0; 0.1 works"
    assert wanted in refusal(table(training={"mtp_loss_weight": 0.3}))
