"""Sizes that do not divide over the grid are refused. The message names the layer, the number, and sizes that work."""

from __future__ import annotations

import ast
import random
import re
from typing import Any

import pytest
from tiny_runs import HYBRID, tiny_run

from fourfold.config.layout import attention_split
from fourfold.config.run import RunConfig
from fourfold.errors import UserError

MHA = {"preset": "llama-tiny", "num_key_value_heads": 8}


@pytest.mark.parametrize(
    ("model", "parallel", "training", "message"),
    [
        (
            {},
            {"x": 3},
            {},
            "layers.*.self_attn.qkv.q_proj: model.num_attention_heads = 8 cannot be split over x = 3; x = 2 or 4 works",
        ),
        (
            {"num_attention_heads": 12, "num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 176},
            {"x": 3},
            {},
            "layers.*.self_attn.qkv.k_proj: model.num_key_value_heads × head_dim = 1 × 8 = 8 cannot be split "
            "over x = 3; x = 2 or 4 works",
        ),
        (
            {},
            {"y": 3},
            {},
            "the residual stream: model.hidden_size = 64 cannot be split over y = 3; y = 2 or 4 works",
        ),
        (
            {"intermediate_size": 172},
            {"x": 8},
            {},
            "layers.*.mlp.up: model.intermediate_size = 172 cannot be split over x = 8; "
            "x = 4 works, and so does model.intermediate_size = 176",
        ),
        (
            {"pad_vocab_size_to_multiple_of": 1},
            {"x": 2},
            {},
            "embed_tokens and lm_head: model.vocab_size (pad_vocab_size_to_multiple_of = 1) = 257 cannot be split "
            "over x = 2; x = 1 works, and so does model.pad_vocab_size_to_multiple_of = 2",
        ),
        (
            {"vocab_size": 97, "pad_vocab_size_to_multiple_of": 1, "num_attention_heads": 6, "num_key_value_heads": 3}
            | {"intermediate_size": 96, "head_dim": 8},
            {"x": 3},
            {"seq_length": 48},
            "embed_tokens and lm_head: model.vocab_size (pad_vocab_size_to_multiple_of = 1) = 97 cannot be split "
            "over x = 3; x = 1 works, and so does model.pad_vocab_size_to_multiple_of = 3",
        ),
        (
            {"position_embedding": "learned", "max_position_embeddings": 101},
            {"x": 2},
            {},
            "embed_positions: model.max_position_embeddings = 101 cannot be split over x = 2; "
            "x = 1 works, and so does model.max_position_embeddings = 100",
        ),
        (
            {},
            {"x": 2},
            {"seq_length": 33},
            "the residual stream: training.seq_length = 33 cannot be split over x = 2; "
            "x = 1 works, and so does training.seq_length = 32",
        ),
        (
            {},
            {"y": 2},
            {"seq_length": 33, "micro_batch_size": 1},
            "lm_head: training.micro_batch_size × seq_length = 1 × 33 = 33 cannot be split over y = 2; "
            "y = 1 works, and so does training.seq_length = 32",
        ),
        (
            {"num_key_value_heads": 1, "head_dim": 2, "num_attention_heads": 16},
            {"x": 2, "y": 2},
            {},
            "layers.*.self_attn.qkv.k_proj: model.num_key_value_heads × head_dim = 1 × 2 = 2 cannot be split "
            "over x·y = 4; x = 1 or y = 1 works, and so does model.num_key_value_heads = 2",
        ),
        (
            {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32},
            {"y": 4},
            {"micro_batch_size": 2, "seq_length": 34},
            "attention cannot be split over y = 4: model.num_attention_heads = 2 is not divisible by x·y = 4",
        ),
        (
            {"position_embedding": "learned", "max_position_embeddings": 16},
            {},
            {},
            "training.seq_length = 32 is longer than the position table, which has model.max_position_embeddings = 16",
        ),
        (
            {},
            {"z": 2, "dp": 2},
            {"global_batch_size": 6},
            "training.global_batch_size = 6 is not a multiple of micro_batch_size × dp × z = 2 × 2 × 2 = 8; "
            "global_batch_size = 8 works",
        ),
        ({}, {}, {"global_batch_size": 7}, "= 2 × 1 × 1 = 2; global_batch_size = 8 works"),
        (
            {},
            {"cp": 2},
            {"seq_length": 34},
            "training.seq_length = 34 must be a multiple of 2·cp = 4, because every rank of cp has two chunks of the "
            "sequence; seq_length = 32 works",
        ),
        (
            {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32},
            {"y": 4, "cp": 2},
            {"micro_batch_size": 2},
            "attention cannot be split over y = 4 together with cp = 2: model.num_attention_heads = 2 is not divisible "
            "by x·y = 4, and training.micro_batch_size = 2 is not divisible by y; micro_batch_size = 4 works",
        ),
        ({}, {"cp": 8, "cp_method": "ulysses"}, {"seq_length": 64}, "share the heads; cp_method = 'ring' works"),
        (
            {},
            {"pp": 4},
            {},
            "makes 4 stages, but the model has 2 layers; pp = 2 works, and so does num_hidden_layers = 4",
        ),
        (
            {"num_hidden_layers": 4},
            {"pp": 2, "layers_per_stage": [3, 2]},
            {},
            "sum to 4; layers_per_stage = [2, 2] works",
        ),
        (
            {"num_hidden_layers": 4},
            {"pp": 2, "z": 2, "schedule": "ZBVZeroBubble"},
            {},
            "it allows z = 1 with zero 0 or 1, but this grid has z = 2 and zero = 0; schedule = '1F1B'",
        ),
        (
            {"num_hidden_layers": 8},
            {"pp": 2, "schedule": "Interleaved1F1B"},
            {"global_batch_size": 10},
            "runs micro-batches in rounds of pp = 2, but a step has 5 micro-batches; global_batch_size = 8 works",
        ),
        ({"num_hidden_layers": 8}, {"pp": 4, "schedule": "DualPipeV"}, {}, "needs at least 2·pp = 8 micro-batches"),
        (
            HYBRID | {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8},
            {"x": 2, "y": 2},
            {"micro_batch_size": 1},
            "linear attention cannot be split over y = 2: model.num_attention_heads = 6 is not divisible by x·y = 4, "
            "and training.micro_batch_size = 1 is not divisible by y; micro_batch_size = 2 works",
        ),
        (
            HYBRID,
            {"x": 2, "cp": 4},
            {},
            "linear attention: model.linear_num_key_heads = 4 cannot be split over x·cp = 8; x = 1 or cp = 2 works, "
            "and so does model.linear_num_key_heads = 8",
        ),
        (
            HYBRID,
            {"x": 2, "y": 4},
            {},
            "linear attention: model.linear_num_key_heads = 4 cannot be split over x·y = 8; x = 1 or y = 2 works, "
            "and so does model.linear_num_key_heads = 8",
        ),
    ],
)
def test_refused(model: dict[str, Any], parallel: dict[str, int], training: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        tiny_run({"preset": "llama-tiny", **model}, parallel, training=training)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("sizes", [(11, 4), (1, 7), (30, 7), (64, 48), (2**40, 3), (10**12, 64 * 3)])
def test_sizes_that_a_refusal_suggests_work(sizes: tuple[int, int]) -> None:
    """Some of the numbers are so large that trying every divisor would take forever."""
    inner, x = sizes
    model = {
        "preset": "llama-tiny",
        "num_attention_heads": x,
        "num_key_value_heads": x,
        "head_dim": 2,
        "hidden_size": 64,
    }
    model |= {"intermediate_size": inner, "pad_vocab_size_to_multiple_of": 64 * 7 * 9}
    with pytest.raises(UserError, match="intermediate_size") as error:
        tiny_run(model, {"x": x}, training={"seq_length": 4 * x})
    found = re.search(r"; x = (.*) works, and so does model.intermediate_size = (\d+)$", str(error.value))
    assert found is not None
    for size in found[1].split(" or "):
        tiny_run(model, {"x": int(size)}, training={"seq_length": 4 * x})
    tiny_run(model | {"intermediate_size": int(found[2])}, {"x": x}, training={"seq_length": 4 * x})


WRONG: tuple[tuple[str, tuple[object, ...]], ...] = (
    ("model.num_attention_heads", (6, 12)),
    ("model.num_key_value_heads", (1, 2, 8)),
    ("model.intermediate_size", (172, 90)),
    ("model.pad_vocab_size_to_multiple_of", (1, 6)),
    ("model.hidden_size", (48, 72)),
    ("model.num_hidden_layers", (4, 6)),
    ("training.seq_length", (33, 36, 2048)),
    ("training.micro_batch_size", (1, 3)),
    ("training.global_batch_size", (7, 24)),
    *((f"parallel.{axis}", (2, 3, 4)) for axis in ("x", "y", "z", "dp", "cp", "pp", "ep")),
    ("parallel.zero", (1, 3)),
    ("parallel.schedule", ("Interleaved1F1B", "ZBVZeroBubble", "DualPipeV")),
    ("parallel.cp_method", ("ulysses",)),
    ("parallel.layers_per_stage", ((1, 1), (3, 2))),
    ("overlap.batch_parts", (2, 3)),
    ("overlap.shards_per_node", (3,)),
)
"""Keys with values that break rules, alone or together."""
BASES: tuple[dict[str, Any], ...] = (
    {"preset": "llama-tiny"},
    {"preset": "moe-tiny"},
    {"preset": "gpt-tiny", "max_position_embeddings": 66},
    HYBRID,
)
PROPOSED = re.compile(r"(?:(\w+)\.)?(\w+) = ('\w+'|\[[\d, ]+\]|\d+)(?: or ('\w+'|\d+))?(?= works| or|, and so|$)")
"""A key and its values in the part of a refusal that says what works."""


def changed(tables: dict[str, dict[str, Any]], key: str, value: object) -> dict[str, dict[str, Any]]:
    section, _, name = key.partition(".")
    return {**tables, section: tables.get(section, {}) | {name: value}}


def section_with(name: str) -> str:
    return next(s for s in ("parallel", "training", "overlap", "model")
                if name in RunConfig.model_fields[s].annotation.model_fields)  # fmt: skip


def test_every_refusal_names_a_key_its_value_and_a_value_that_works() -> None:
    """Use run files with up to three wrong keys. If you apply a value that the error proposes, this error must
    disappear."""
    draw, seen = random.Random(0), set[str]()
    for _ in range(600):
        tables: dict[str, dict[str, Any]] = {"model": dict(draw.choice(BASES))}
        for key, values in draw.sample(WRONG, draw.randint(1, 3)):
            tables = changed(tables, key, draw.choice(values))
        refusal = refusal_of(tables)
        if refusal is None:
            continue
        problem, _, advice = refusal.rpartition("; ")
        named = re.findall(r"\b(model|parallel|training|overlap)\.(\w+)[^;]*? = [\d\['(]", problem)
        assert any(name in RunConfig.model_fields[section].annotation.model_fields for section, name in named), refusal
        proposals = PROPOSED.findall(advice)
        assert proposals, refusal
        for section, name, *values in proposals:
            key = f"{section or section_with(name)}.{name}"
            for value in filter(None, values):
                after = refusal_of(changed(tables, key, ast.literal_eval(value)))
                assert after is None or kind(after) != kind(refusal), (refusal, key, value, after)
        seen.add(kind(refusal))
    assert len(seen) > 15


def kind(refusal: str) -> str:
    """Return the reason of a refusal, without its numbers."""
    return re.sub(r"\d+", "", refusal.rpartition("; ")[0])


def refusal_of(tables: dict[str, dict[str, Any]]) -> str | None:
    model, parallel, others = (
        tables["model"],
        tables.get("parallel"),
        {k: tables[k] for k in tables.keys() - {"model", "parallel"}},
    )
    try:
        tiny_run(model, parallel, **others)
    except UserError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"overlap": {"batch_parts": 2}},
            "overlap.batch_parts = 2 is for dense models with neither latent, linear, nor",
        ),
        ({"training": {"precision": "bf16", "float8": "rowwise"}}, "training.float8 = 'rowwise' is for dense models"),
        (
            {"training": {"compile": True}},
            "training.compile = true does not work with model.linear_num_key_heads = 4; training.compile = false works",
        ),
        (
            {"training": {"tuned_products": "cached"}},
            "training.tuned_products = 'cached' does not work with model.linear_num_key_heads = 4; "
            "training.tuned_products = 'off' works",
        ),
    ],
    ids=str,
)
def test_what_linear_attention_does_not_support_is_refused(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        tiny_run(HYBRID, {"x": 2}, **sections)
    assert message in str(error.value)


def test_what_gated_attention_does_not_support_is_refused() -> None:
    gated = {"preset": "llama-tiny", "attention_output_gate": True}
    tiny_run(gated, {"x": 2}, training={"compile": True})
    with pytest.raises(UserError, match="batch_parts = 1 works"):
        tiny_run(gated, {"x": 2}, overlap={"batch_parts": 2})
    with pytest.raises(UserError, match="float8 = 'none' works"):
        tiny_run(gated, {"x": 2}, training={"precision": "bf16", "float8": "rowwise"})
    with pytest.raises(UserError, match=r"does not work with model\.attention_output_gate = true"):
        tiny_run(gated, {"x": 2}, training={"tuned_products": "cached"})


def test_every_size_that_divides_is_accepted() -> None:
    for parallel in ({"x": 8}, {"y": 64}, {"x": 2, "y": 4, "z": 2, "dp": 2}, {"x": 4, "y": 2, "zero": 3, "dp": 4}):
        training = {"global_batch_size": 16, "micro_batch_size": 1, "seq_length": 64}
        assert tiny_run(MHA, parallel, training=training).parallel.world_size > 1


def test_how_attention_is_shared_over_y() -> None:
    for y, training, split in (
        (2, {}, "heads"),
        (4, {}, "heads"),
        (16, {"micro_batch_size": 16, "global_batch_size": 16}, "batch"),
        (16, {"micro_batch_size": 2, "seq_length": 32}, "sequence"),
    ):
        run = tiny_run(MHA, {"y": y}, training=training)
        assert attention_split(run) == split
