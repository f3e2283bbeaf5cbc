"""Parity against transformers opens the imported folder twice: with our importer on the grid, and with the library."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from mutation import mutated
from pool import Pool
from tiny_huggingface import make_model
from tuned_products import parity_on_cpu

from fourfold.config.run import RunConfig
from fourfold.data.tokenizer import train_bpe
from fourfold.run_file.load import make_run
from fourfold.verification.parity_report import ParityReport

transformers = pytest.importorskip("transformers")

CASES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "llama": ({"x": 2}, {}),
    "qwen3": ({"x": 2, "z": 2}, {}),
    "gpt2": ({"y": 2}, {}),
    "gpt_neox": ({"pp": 2}, {}),
    "mistral": ({"cp": 2}, {"data": {"mask_documents": True}}),
    "gemma2": ({"dp": 2}, {}),
    "olmo2": ({"z": 2}, {"lora": {"rank": 2}}),
    "glm": ({"x": 2}, {"lora": {"rank": 2}}),
    "glm4": ({"x": 2, "y": 2}, {}),
    "helium biases": ({"z": 2}, {}),
    "ernie4_5 biases": ({"pp": 2}, {}),
    "starcoder2": ({"y": 2}, {}),
    "seed_oss": ({"cp": 2}, {"data": {"mask_documents": True}}),
    "granite": ({"x": 2, "y": 2}, {}),
    "arcee biases": ({"y": 2}, {}),
    "stablelm": ({"pp": 2}, {}),
    "smollm3": ({"cp": 2}, {"data": {"mask_documents": True}}),
    "exaone4": ({"x": 2, "z": 2}, {}),
    "vaultgemma": ({"x": 2}, {}),
    "ministral": ({"dp": 2}, {}),
    "qwen3_moe": ({"ep": 2, "dp": 2}, {}),
    "qwen3_next": ({"x": 2}, {}),
    "qwen3_5": ({"cp": 2}, {"data": {"mask_documents": True}}),
    "gpt_oss": ({"x": 2}, {}),
    "deepseek_v3": ({"x": 2, "y": 2}, {}),
    "deepseek_v2": ({"y": 2}, {}),
    "youtu": ({"x": 2}, {"lora": {"rank": 2}}),
    "granite_swa": ({"x": 2, "y": 2}, {"data": {"mask_documents": True}}),
    "granitemoe_swa": ({"x": 2}, {}),
    "granitemoeshared": ({"ep": 2, "dp": 2}, {}),
    "hyperclovax": ({"y": 2}, {}),
    "cwm": ({"cp": 2}, {"data": {"mask_documents": True}}),
    "exaone": ({"z": 2}, {}),
    "internlm3 biases": ({"x": 2}, {}),
    "iquestcoder": ({"dp": 2}, {}),
    "jais2": ({"x": 2, "y": 2}, {}),
    "gpt_neo": ({"cp": 2}, {"data": {"mask_documents": True}}),
    "gpt_bigcode": ({"y": 2}, {}),
    "falcon biases": ({"x": 2, "y": 2}, {}),
    "flint": ({"x": 2}, {}),
    "mellum": ({"pp": 2}, {}),
    "flex_olmo": ({"x": 2, "z": 2}, {}),
    "aria_text": ({"ep": 2, "dp": 2}, {}),
    "solar_open": ({"x": 2}, {}),
    "dots1": ({"pp": 2}, {}),
    "sarvam_moe": ({"y": 2}, {"lora": {"rank": 2}}),
    "exaone_moe": ({"ep": 2, "dp": 2}, {}),
    "hy_v3": ({"x": 2, "y": 2}, {}),
    "minimax_m2": ({"x": 2}, {}),
    "glm4_moe_lite": ({"x": 2, "y": 2}, {}),
    "sarvam_mla": ({"y": 2}, {}),
}
"""Family, grid, and further sections of the run file."""


def make_import(folder: Path, name: str, grid: dict[str, int], sections: dict[str, Any], **changes: Any) -> RunConfig:
    make_model(folder / "model", name, vocab_size=288, **changes)
    train_bpe(["def main():\n    return 0\n" * 9, "zwei Äpfel 東京"], 280, folder / "model" / "tokenizer.json")
    (folder / "model" / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"})
    )
    data = {"train": [{"path": "nowhere"}]} | sections.get("data", {})
    training = {"micro_batch_size": 2, "global_batch_size": 8, "seq_length": 32, "train_steps": 4, "device": "cpu"}
    return make_run({
        **sections, "name": "run", "output_dir": str(folder), "data": data, "training": training, "parallel": grid,
        "model": {"from_hf": str(folder / "model")},
    })  # fmt: skip


def body(rank: int, world_size: int, run: RunConfig, fault: tuple[str, str, str] | None) -> ParityReport | None:
    with nullcontext() if fault is None else mutated(*fault):
        return parity_on_cpu(run, steps=1, against="transformers")


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("name", CASES)
def test_an_imported_model_computes_what_the_library_computes(pool: Pool, tmp_path: Path, name: str) -> None:
    run = make_import(tmp_path, name, *CASES[name])
    report = pool.run(run.parallel.world_size, body, run, None)[0]
    assert [each.tensor for each in report.deviations["imported"]][-1] == "tokens"
    assert report.ok, report.record()


CONFIG = "fourfold.huggingface.architectures.config_json"
LAYERS = "fourfold.huggingface.architectures.layer_keys"
CONFIG_FAULTS: dict[str, tuple[str, dict[str, Any], tuple[str, str, str]]] = {
    "the base of the rotary embedding is not read": (
        "llama",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}},
        (f"{CONFIG}:model_keys", "keys |= rope_keys(given, family, where)", "pass"),
    ),
    "the window is not read": (
        "mistral",
        {"sliding_window": 8},
        (f"{CONFIG}:model_keys", "keys |= _windows(given, family, where)", "keys['sliding_window'] = 0"),
    ),
    "the norms' eps is not read": (
        "llama",
        {"rms_norm_eps": 0.1},
        (
            f"{CONFIG}:model_keys",
            "given.get(theirs) is not None",
            "given.get(theirs) is not None and 'eps' not in ours",
        ),
    ),
    "the factor on the logits divides them": (
        "hyperclovax",
        {},
        (f"{CONFIG}:model_keys", "keys[key] = 1 / keys[key]", "pass"),
    ),
    "the layers without rotary embeddings rotate": (
        "granite_swa",
        {},
        (f"{LAYERS}:rotating_layers", "return _thetas_of_layers(given, family, where)", "return {}"),
    ),
    "the rotary bases of the layers are not read": (
        "granite_swa",
        {},
        (f"{LAYERS}:_thetas_of_layers", "{'rope_theta': float(bases.pop())}", "{}"),
    ),
    "layers with local attention attend to all tokens": (
        "gpt_neo",
        {},
        (f"{LAYERS}:types_of_gpt_neo", "{'global': FULL, 'local': SLIDING}", "{'global': FULL, 'local': FULL}"),
    ),
    "full-attention layers rotate, although only sliding layers do": (
        "exaone_moe sparse",
        {},
        (f"{CONFIG}:_windows", "family.rotating_layers in ('sliding', 'only_sliding')", "False"),
    ),
}
"""Family, keys of config.json, and a fault of our reader."""
WEIGHT_FAULTS = {
    "every rank reads the first experts": (
        "qwen3_moe",
        (
            "fourfold.huggingface.weights:Pretrained.read_into",
            "zip(out, places[slices[0]], strict=True)",
            "zip(out, places, strict=False)",
        ),
    ),
    "queries, keys, and values are read without their order by heads": (
        "gpt_neox",
        (
            "fourfold.huggingface.weights:Pretrained._read_piece",
            "piece.runs(rows)",
            "((slice(r - rows.start, r - rows.start + 1), slice(r, r + 1)) for r in range(rows.start, rows.stop))",
        ),
    ),
    "queries and gates are read head after head, although each head has both": (
        "qwen3_next",
        (
            "fourfold.huggingface.weight_names:_their_tensor",
            "[key for part, key in files.by_head.items() if part in theirs]",
            "[key for part, key in files.by_head.items() if part in theirs and 'q_proj' not in theirs]",
        ),
    ),
    "rows of interleaved pairs are read in the files' order": (
        "glm4",
        ("fourfold.huggingface.weight_names:TensorPiece.runs", "self.paired_rows", "0"),
    ),
    "all rows of a head are read as interleaved pairs, although only half of them rotate": (
        "glm4",
        (
            "fourfold.huggingface.weight_names:TensorPiece.runs",
            "(range(0, pairs, 2), range(1, pairs, 2), range(pairs, size))",
            "(range(0, size, 2), range(1, size, 2))",
        ),
    ),
    "rows of interleaved pairs are read second half first": (
        "glm4",
        (
            "fourfold.huggingface.weight_names:TensorPiece.runs",
            "(range(0, pairs, 2), range(1, pairs, 2), range(pairs, size))",
            "(range(1, pairs, 2), range(0, pairs, 2), range(pairs, size))",
        ),
    ),
    "the biases of interleaved pairs are read in the files' order": (
        "glm4",
        (
            "fourfold.huggingface.weight_names:_their_tensor",
            "any(part in name for part in files.rotated_in_pairs)",
            "any(part in name and 'weight' in name for part in files.rotated_in_pairs)",
        ),
    ),
    "the tokenizer drops spaces": (
        "llama",
        (
            "fourfold.data.tokenizer:HFTokenizer.encode_batch",
            "self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)",
            "self._tokenizer.encode_batch_fast([text.strip() for text in texts], add_special_tokens=False)",
        ),
    ),
}


@pytest.mark.parametrize("fault", CONFIG_FAULTS)
def test_a_fault_in_reading_the_configuration_is_seen(pool: Pool, tmp_path: Path, fault: str) -> None:
    name, changes, place = CONFIG_FAULTS[fault]
    with mutated(*place):
        run = make_import(tmp_path, name, {"x": 2}, {}, **changes)
    report = pool.run(2, body, run, None)[0]
    assert report.worst("imported").ratio > 2 * report.limit


@pytest.mark.parametrize("place", [fault[-1] for fault in [*CONFIG_FAULTS.values(), *WEIGHT_FAULTS.values()]], ids=str)
def test_a_fault_changes_the_function_that_it_names(place: tuple[str, str, str]) -> None:
    """If this fails, the code that the fault changes was rewritten. Define the fault for the new code."""
    with mutated(*place) as changed:
        assert changed == [place[0].partition(":")[2]]


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("fault", WEIGHT_FAULTS)
def test_a_fault_in_reading_weights_or_texts_is_seen(pool: Pool, tmp_path: Path, fault: str) -> None:
    name, place = WEIGHT_FAULTS[fault]
    run = make_import(tmp_path, name, *CASES[name])
    report = pool.run(run.parallel.world_size, body, run, place)[0]
    assert report.worst("imported").ratio > 2 * report.limit
