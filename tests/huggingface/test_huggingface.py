"""Import and export of Hugging Face models on any grid."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from safetensors.torch import save_file
from tiny_corpus import run_file
from tiny_huggingface import MODELS, make_model, ours_of, tokens, weights_of
from tiny_runs import LLAMA, random_global_batch, tiny_run
from tokenizers import Tokenizer
from torch import Tensor

from fourfold.checkpoints.checkpoint import Checkpointer, load_checkpoint
from fourfold.config.model import ModelConfig
from fourfold.config.presets import PRESETS
from fourfold.config.run import CheckpointConfig, RunConfig
from fourfold.data.loader import MicroBatch
from fourfold.data.prepare import prepare
from fourfold.data.tokenizer import train_bpe
from fourfold.errors import UserError
from fourfold.huggingface.architectures.config_json import model_of, read_config
from fourfold.huggingface.architectures.families import FAMILIES
from fourfold.huggingface.architectures.written_config import config_of
from fourfold.huggingface.export_model import export_huggingface
from fourfold.huggingface.import_model import import_huggingface, load_pretrained
from fourfold.parallel.grid.grid import Grid
from fourfold.parallel.state import gather_full
from fourfold.run_file.load import make_run
from fourfold.training.job import Job
from fourfold.verification.batches import random_micro_batches

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "hf", name)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        expected, logits = theirs(tokens()).logits, ours_of(folder)(tokens())
    assert expected.abs().max() > 1
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "gpt_oss", "qwen3_next"])
def test_greedy_tokens_are_those_that_transformers_generates(name: str, tmp_path: Path) -> None:
    """transformers caches keys and values. Our decoder computes the whole sequence for each token."""
    folder = make_model(tmp_path / "hf", name)
    model, ours = transformers.AutoModelForCausalLM.from_pretrained(folder).eval(), ours_of(folder)
    found = tokens()[:1, :12]
    settings = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
    expected = model.generate(found, attention_mask=torch.ones_like(found), **settings)
    for _ in range(24):
        found = torch.cat([found, ours(found)[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, marks=[pytest.mark.slow] if (number + place) % 2 else [], id=f"{name}-{dtype}")
        for number, name in enumerate(MODELS)
        for place, dtype in enumerate((torch.float32, torch.bfloat16))
    ],
)
def test_round_trip_is_bit_identical(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "hf", name, dtype)
    assert len(list(folder.glob("*.safetensors"))) > 1
    (folder / "tokenizer_config.json").write_text('{"eos_token": "x"}')
    import_huggingface(str(folder), tmp_path / "ours")
    export_huggingface(tmp_path / "ours", tmp_path / "back")
    before, after = weights_of(folder), weights_of(tmp_path / "back")
    assert before.keys() == after.keys()
    for key in before:
        assert before[key].dtype == after[key].dtype and torch.equal(before[key], after[key]), key
    for file in ("config.json", "generation_config.json", "tokenizer_config.json"):
        assert (folder / file).is_file()
        assert json.loads((tmp_path / "back" / file).read_text()) == json.loads((folder / file).read_text())
    first, second = (transformers.AutoModelForCausalLM.from_pretrained(f) for f in (folder, tmp_path / "back"))
    with torch.no_grad():
        assert torch.equal(first(tokens()).logits, second(tokens()).logits)


@pytest.mark.parametrize("name", MODELS)
def test_a_config_made_anew_says_the_same(name: str, tmp_path: Path) -> None:
    """Without the original config.json, we write a new one, and transformers computes the same from it."""
    folder = make_model(tmp_path / "hf", name)
    kind = read_config(folder)["model_type"]
    import_huggingface(str(folder), tmp_path / "ours")
    shutil.rmtree(tmp_path / "ours" / "huggingface")
    assert export_huggingface(tmp_path / "ours", tmp_path / "back", kind=kind).kind == kind
    first, second = (transformers.AutoModelForCausalLM.from_pretrained(f) for f in (folder, tmp_path / "back"))
    with torch.no_grad():
        assert torch.equal(first(tokens()).logits, second(tokens()).logits)


OF_PRESETS = {
    "moe-tiny": "qwen3_moe",
    "mistral-7b": "mistral",
    "gemma2-2b": "gemma2",
    "mixtral-8x7b": "mixtral",
    "mixtral-8x22b": "mixtral",
    "qwen3-30b-a3b": "qwen3_moe",
    "qwen3-235b-a22b": "qwen3_moe",
    "qwen3-next-80b-a3b": "qwen3_next",
    "qwen3.5-9b": "qwen3_5_text",
    "qwen3.5-35b-a3b": "qwen3_5_moe_text",
    "olmoe-1b-7b": "olmoe",
    "gpt-oss-20b": "gpt_oss",
    "gpt-oss-120b": "gpt_oss",
    "deepseek-v2-lite": "deepseek_v2",
    "deepseek-v3": "deepseek_v3",
    "kimi-k2": "deepseek_v3",
}


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_has_a_hugging_face_config(preset: str) -> None:
    model = ModelConfig(**PRESETS[preset])
    config = config_of(model)
    dense = "gpt2" if model.position_embedding == "learned" else "llama"
    assert config["model_type"] == OF_PRESETS.get(preset, dense)


def test_the_preset_of_gpt_oss_is_its_config_json() -> None:
    """The test has the keys of openai/gpt-oss-20b, as published for transformers 4."""
    rope = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
    published = {
        "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "vocab_size": 201088, "hidden_size": 2880,
        "intermediate_size": 2880, "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8,
        "head_dim": 64, "hidden_act": "silu", "attention_bias": True, "num_local_experts": 32, "num_experts_per_tok": 4,
        "experts_per_token": 4, "layer_types": ["sliding_attention", "full_attention"] * 12, "sliding_window": 128,
        "max_position_embeddings": 131072, "rope_scaling": {**rope, "original_max_position_embeddings": 4096},
        "initial_context_length": 4096, "rope_theta": 150000, "rms_norm_eps": 1e-5, "swiglu_limit": 7.0,
        "tie_word_embeddings": False, "quantization_config": {"quant_method": "mxfp4"},
    }  # fmt: skip
    assert model_of(published, "config.json") == ModelConfig(**PRESETS["gpt-oss-20b"])


@pytest.mark.parametrize("name", ["exaone", "internlm3", "iquestcoder", "sarvam_moe", "sarvam_mla"])
def test_published_files_may_name_the_class_of_their_own_code(name: str, tmp_path: Path) -> None:
    config = read_config(make_model(tmp_path / "hf", name))
    published = {"architectures": [FAMILIES[config["model_type"]].published_as]}
    assert published["architectures"] != config["architectures"]
    assert model_of(config | published, "config.json") == model_of(config, "config.json")


def test_other_cuts_of_the_files_are_read(tmp_path: Path) -> None:
    """The model has a single file. The names in the file lack the prefix, as in base models, and the file has buffers,
    as older files do."""
    folder = make_model(tmp_path / "hf", "gpt2")
    weights = {name.removeprefix("transformer."): tensor for name, tensor in weights_of(folder).items()}
    weights["h.0.attn.bias"] = torch.ones(1, 1, 64, 64)
    expected = ours_of(folder)(tokens())
    for file in [*folder.glob("*.safetensors"), folder / "model.safetensors.index.json"]:
        file.unlink()
    save_file(weights, folder / "model.safetensors")
    assert torch.equal(ours_of(folder)(tokens()), expected)


def test_a_head_may_have_the_name_of_its_module(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "hf", "gpt_neox")
    weights, expected = weights_of(folder), ours_of(folder)(tokens())
    weights["lm_head.weight"] = weights.pop("embed_out.weight")
    (folder / "model.safetensors.index.json").unlink()
    save_file(weights, folder / "model.safetensors")
    assert torch.equal(ours_of(folder)(tokens()), expected)
    tied = make_model(tmp_path / "tied", "gpt_neox tied")
    weights, expected = weights_of(tied), ours_of(tied)(tokens())
    (tied / "model.safetensors.index.json").unlink()
    save_file(weights | {"embed_out.weight": weights["gpt_neox.embed_in.weight"].clone()}, tied / "model.safetensors")
    assert torch.equal(ours_of(tied)(tokens()), expected)


def test_a_tied_head_may_be_stored(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "hf", "qwen2 tied")
    weights, expected = weights_of(folder), ours_of(folder)(tokens())
    (folder / "model.safetensors.index.json").unlink()
    save_file(weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}, folder / "model.safetensors")
    assert torch.equal(ours_of(folder)(tokens()), expected)


GRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "x2 y2": ("llama 3", {"x": 2, "y": 2}),
    "x2 z2 gpt2": ("gpt2", {"x": 2, "z": 2}),
    "y2 z2 phi3": ("phi3", {"y": 2, "z": 2}),
    "dp2 zero 3": ("qwen3 tied", {"dp": 2, "zero": 3}),
    "pp2 tied": ("qwen2 tied", {"pp": 2}),
    "pp2 x2": ("mistral", {"pp": 2, "x": 2}),
    "cp2 x2": ("llama mqa biases", {"cp": 2, "x": 2}),
    "x2 y2 gpt_neox": ("gpt_neox", {"x": 2, "y": 2}),
    "z2 pp2 gpt_neox": ("gpt_neox in turn", {"z": 2, "pp": 2}),
    "x2 y2 gemma": ("gemma", {"x": 2, "y": 2}),
    "x2 y2 gemma2": ("gemma2", {"x": 2, "y": 2}),
    "cp2 gemma3": ("gemma3 stretched", {"cp": 2}),
    "x2 z2 olmo2": ("olmo2", {"x": 2, "z": 2}),
    "pp2 olmo3": ("olmo3", {"pp": 2}),
    "x2 y2 glm4": ("glm4", {"x": 2, "y": 2}),
    "x2 z2 glm": ("glm", {"x": 2, "z": 2}),
    "z4 helium": ("helium biases", {"z": 4}),
    "pp2 x2 ernie4_5": ("ernie4_5 biases", {"pp": 2, "x": 2}),
    "x2 y2 starcoder2": ("starcoder2", {"x": 2, "y": 2}),
    "dp2 zero 3 seed_oss": ("seed_oss biases", {"dp": 2, "zero": 3}),
    "pp2 vaultgemma": ("vaultgemma", {"pp": 2}),
    "cp2 ministral": ("ministral", {"cp": 2}),
    "dp2 ep2 mixtral": ("mixtral tied", {"dp": 2, "ep": 2}),
    "x2 y2 olmoe": ("olmoe", {"x": 2, "y": 2}),
    "z2 x2 ep2 zero 3 qwen3_moe": ("qwen3_moe", {"z": 2, "x": 2, "ep": 2, "zero": 3}),
    "y2 cp2 ep2 qwen2_moe": ("qwen2_moe", {"y": 2, "cp": 2, "ep": 2}),
    "pp2 glm4_moe": ("glm4_moe", {"pp": 2}),
    "x2 z2 qwen3_next": ("qwen3_next", {"x": 2, "z": 2}),
    "cp2 z2 qwen3_5": ("qwen3_5", {"cp": 2, "z": 2}),
    "dp2 ep2 zero 3 qwen3_5_moe": ("qwen3_5_moe", {"dp": 2, "ep": 2, "zero": 3}),
}


def run_from(folder: Path, parallel: dict[str, Any], **sections: Any) -> RunConfig:
    training = {"global_batch_size": 8, "micro_batch_size": 2, "seq_length": 32, "train_steps": 2}
    table = {"model": {"from_hf": str(folder)}, "data": {"source": "python-stdlib"}, "parallel": parallel}
    return make_run({**table, "training": training, "output_dir": str(folder.parent), **sections})


def loss_body(rank: int, world_size: int, run: RunConfig) -> tuple[float, dict[str, Tensor] | None]:
    job = Job(run, Grid(run.parallel, "cpu"), torch.device("cpu"))
    load_pretrained(job, run.model.from_hf)
    batches = random_micro_batches(run, 0, job.grid, job.device)
    loss = job.evaluate(batches).item()
    Checkpointer(Path(run.output_dir) / "checkpoints", job, CheckpointConfig()).save(1)
    return loss, gather_full(job.shards, [shard.local for shard in job.shards])


FAST = ("x2 z2 gpt2", "pp2 tied", "x2 y2 gpt_neox", "x2 y2 gemma", "dp2 ep2 mixtral", "x2 y2 glm4")


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(
    "case", [case if case in FAST else pytest.param(case, marks=pytest.mark.slow) for case in GRIDS]
)
def test_a_grid_reads_its_slices(case: str, pool: Pool, tmp_path: Path) -> None:
    """The weights are bit-identical, the loss equals transformers' loss, and the export of the grid's checkpoint has
    the same bits."""
    name, parallel = GRIDS[case]
    folder = make_model(tmp_path / "hf", name)
    run = run_from(folder, parallel)
    loss, weights = pool.run(run.parallel.world_size, loss_body, run)[0]
    expected = ours_of(folder).state_dict()
    for key, weight in weights.items():
        assert torch.equal(weight, expected[key]), key

    batch = random_global_batch(run, 0)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        logits = theirs(batch.tokens).logits
    reference = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())
    assert loss == pytest.approx(reference.item(), rel=1e-5)

    export_huggingface(tmp_path / "checkpoints" / "step_1", tmp_path / "back", kind=read_config(folder)["model_type"])
    before, after = weights_of(folder), weights_of(tmp_path / "back")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


def resume_body(rank: int, world_size: int, run: RunConfig, path: Path) -> tuple[int, dict[str, Tensor] | None]:
    job = Job(run, Grid(run.parallel, "cpu"), torch.device("cpu"))
    steps = load_checkpoint(path, job)
    return steps, gather_full(job.shards, [shard.local for shard in job.shards])


def test_a_run_begins_with_an_import(pool: Pool, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "hf", "llama gqa tied", torch.bfloat16)
    import_huggingface(str(folder), tmp_path / "ours")
    run = run_from(folder, {"x": 2, "pp": 2})
    steps, weights = pool.run(4, resume_body, run, tmp_path / "ours")[0]
    assert steps == 0
    expected = ours_of(folder).state_dict()
    assert all(torch.equal(weight, expected[key].float()) for key, weight in weights.items())


def save_body(rank: int, world_size: int, run: RunConfig, folder: Path) -> Tensor:
    job = Job(run, Grid(run.parallel, "cpu"), torch.device("cpu"))
    job.initialize(0)
    job.train_step(random_micro_batches(run, 0, job.grid, job.device), 0)
    Checkpointer(folder, job, CheckpointConfig()).save(1)
    return job.outputs([MicroBatch(tokens())])[0]


def test_an_exported_model_has_no_prediction_layers(pool: Pool, tmp_path: Path) -> None:
    run = tiny_run(LLAMA | {"num_nextn_predict_layers": 2})
    logits = pool.run(1, save_body, run, tmp_path / "ours")[0]
    export_huggingface(tmp_path / "ours", tmp_path / "out")
    with torch.no_grad():
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")(tokens()).logits
    assert torch.allclose(logits, theirs, atol=1e-5)


def test_an_exported_model_stops_at_the_end_of_a_trained_document(tmp_path: Path) -> None:
    """The corpus ends documents with another token than the original model."""
    source, checkpoint = make_model(tmp_path / "source", "llama", vocab_size=310), tmp_path / "run/checkpoints/step_0"
    train_bpe(["grid axis tile shard"] * 20, 300, source / "tokenizer.json")
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|im_end|>"])
    tokenizer.save(str(source / "tokenizer.json"))
    end = tokenizer.token_to_id("<|im_end|>")
    import_huggingface(source, checkpoint)
    (tmp_path / "a.txt").write_text("grid axis tile shard")
    for token, ids in {"<|im_end|>": [end, 0], None: 0}.items():
        prepare([tmp_path / "a.txt"], tmp_path / f"corpus{ids}", tokenizer=source, eos_token=token, workers=1)
        run = run_file(tmp_path / "run", str(tmp_path / f"corpus{ids}"), model__preset=None, model__from_hf=str(source))
        assert run == tmp_path / "run" / "run.toml"
        export_huggingface(checkpoint, tmp_path / f"out{ids}")
        for name in ("config.json", "generation_config.json"):
            assert json.loads((tmp_path / f"out{ids}" / name).read_text())["eos_token_id"] == ids, (name, token)


def test_hub_files_may_name_the_experts_otherwise(tmp_path: Path) -> None:
    """In every family, transformers reads both names of the key."""
    config = read_config(make_model(tmp_path / "hf", "qwen3_moe"))
    experts = config.pop("num_experts", None) or config.pop("num_local_experts")
    config.pop("num_local_experts", None)
    assert model_of(config | {"num_local_experts": experts}, "here") == model_of(config | {"num_experts": experts}, "")


def test_positions_limit_the_sequence(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "short", "llama", max_position_embeddings=16)
    with pytest.raises(UserError, match="16 positions"):
        run_from(folder, {})
    with pytest.raises(UserError, match="leave one of them out"):
        make_run({"model": {"from_hf": str(folder), "preset": "gpt2"}})
    with pytest.raises(UserError, match="no folder"):
        make_run({"model": {"from_hf": str(tmp_path / "nowhere")}})


def test_ids_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No pickles and no code are downloaded. Without a network and a cache, the error is one sentence."""
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(
        UserError, match="there is no folder nobody/nothing, and the Hub has no such model or cannot be reached: "
    ):
        import_huggingface("nobody/nothing", tmp_path / "ours")

    folder = make_model(tmp_path / "hf", "gpt2")
    asked: list[tuple[str, list[str]]] = []

    def download(name: str, allow_patterns: list[str], ignore_patterns: str) -> str:
        asked.append((name, allow_patterns))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    import_huggingface("somebody/something", tmp_path / "ours")
    assert {name for name, _ in asked} == {"somebody/something"}
    suffixes = {Path(pattern).suffix for _, patterns in asked for pattern in patterns}
    assert suffixes == {".json", ".safetensors", ".model", ".txt", ".jinja"}
