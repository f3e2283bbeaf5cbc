"""Hugging Face models in and out, on any grid."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from safetensors.torch import load_file, save_file
from tiny_huggingface import MODELS, make_model, ours_of
from tiny_runs import random_global_batch
from torch import Tensor

from fourfold.checkpoints.checkpoint import Checkpointer, load_checkpoint
from fourfold.config.model import ModelConfig
from fourfold.config.presets import PRESETS
from fourfold.config.run import CheckpointConfig, RunConfig
from fourfold.errors import UserError
from fourfold.huggingface.architectures.config_json import config_of, model_of, read_config
from fourfold.huggingface.export_model import export_huggingface
from fourfold.huggingface.import_model import import_huggingface, load_pretrained
from fourfold.parallel.grid import Grid
from fourfold.parallel.state import gather_full
from fourfold.run_file.load import make_run
from fourfold.training.job import Job
from fourfold.verification.batches import random_micro_batches

transformers = pytest.importorskip("transformers")


def weights_of(folder: Path) -> dict[str, Tensor]:
    return {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}


def tokens() -> Tensor:
    return torch.randint(201, (2, 40), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "hf", name)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        expected, logits = theirs(tokens()).logits, ours_of(folder)(tokens())
    assert expected.abs().max() > 1
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())


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
    """Without the original's config.json: transformers computes the same from the one that we write."""
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
    "olmoe-1b-7b": "olmoe",
}


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_has_a_hugging_face_config(preset: str) -> None:
    model = ModelConfig(**PRESETS[preset])
    config = config_of(model)
    dense = "gpt2" if model.position_embedding == "learned" else "llama"
    assert config["model_type"] == OF_PRESETS.get(preset, dense)


def test_other_cuts_of_the_files_are_read(tmp_path: Path) -> None:
    """One file, and names without the prefix, as base models are stored; buffers of older files."""
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


def test_rotary_embeddings_of_no_channel_are_refused(tmp_path: Path) -> None:
    """transformers computes such a model, without any rotation; whole heads would be silently wrong."""
    folder = make_model(tmp_path / "hf", "gpt_neox")
    config = {key: v for key, v in read_config(folder).items() if key != "rope_parameters"} | {"rotary_pct": 0.0}
    with pytest.raises(UserError, match="partial_rotary_factor: Input should be greater than 0"):
        model_of(config, "here")


def test_a_family_that_cannot_stretch_so_is_not_written() -> None:
    sizes = PRESETS["llama-tiny"] | {"partial_rotary_factor": 0.5}
    assert config_of(ModelConfig(**sizes))["model_type"] == "phi3"
    with pytest.raises(UserError, match="no Hugging Face model"):
        config_of(ModelConfig(**sizes, rope_scaling={"rope_type": "linear", "factor": 2.0}))


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
    "dp2 ep2 mixtral": ("mixtral tied", {"dp": 2, "ep": 2}),
    "x2 y2 olmoe": ("olmoe", {"x": 2, "y": 2}),
    "z2 x2 ep2 zero 3 qwen3_moe": ("qwen3_moe", {"z": 2, "x": 2, "ep": 2, "zero": 3}),
    "y2 cp2 ep2 qwen2_moe": ("qwen2_moe", {"y": 2, "cp": 2, "ep": 2}),
    "pp2 glm4_moe": ("glm4_moe", {"pp": 2}),
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


FAST = ("x2 z2 gpt2", "pp2 tied", "x2 y2 gpt_neox", "x2 y2 gemma", "dp2 ep2 mixtral")


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(
    "case", [case if case in FAST else pytest.param(case, marks=pytest.mark.slow) for case in GRIDS]
)
def test_a_grid_reads_its_slices(case: str, pool: Pool, tmp_path: Path) -> None:
    """Weights bit-equal, the loss that of transformers; and the checkpoint of the grid goes out again bit-equal."""
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


def refusal(folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        import_huggingface(str(folder), folder.parent / "ours")
    assert not (folder.parent / "ours").exists()
    assert sorted(p.name for p in folder.parent.iterdir()) == ["hf"]
    return str(caught.value)


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"model_type": "deepseek_v3"}, ["deepseek_v3", "latent attention"]),
        ({"model_type": "falcon"}, ["falcon", "side by side"]),
        ({"model_type": "gemma3"}, ["gemma3", "images beside text"]),
        ({"model_type": "mamba"}, ["mamba", "llama"]),
        ({"model_type": ["llama"]}, ["model_type = ['llama']"]),
        ({"hidden_act": ["silu"]}, ["hidden_act = ['silu']"]),
        ({"rope_parameters": None, "rope_theta": "a"}, ["rope_theta = 'a' is not a number"]),
        ({"rope_parameters": [1]}, ["rotary embeddings are [1]"]),
        ({"rope_parameters": {"rope_type": "linear", "factor": "two"}}, ["factor = 'two' is not a number"]),
        ({"architectures": ["LlamaForSequenceClassification"]}, ["LlamaForSequenceClassification", "LlamaForCausalLM"]),
        ({"hidden_act": "gelu"}, ["hidden_act = 'gelu'"]),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, ["longrope"]),
        ({"rope_parameters": None, "partial_rotary_factor": 0.5}, ["partial_rotary_factor = 0.5"]),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "mscale": 0.7}}, ["mscale"]),
        ({"quantization_config": {"bits": 4}}, ["quantization_config"]),
        ({"num_key_value_heads": 3}, ["num_attention_heads = 8", "num_key_value_heads = 3"]),
        ({"hidden_size": "64"}, ["hidden_size"]),
        ({"intermediate_size": None}, ["intermediate_size is missing"]),
        ({"intermediate_size": 96}, ["mlp.gate_proj.weight", "[80, 64]", "[96, 64]", ".safetensors"]),
        ({"num_hidden_layers": 1}, ["model.layers.1.", "no place"]),
        ({"num_hidden_layers": 3}, ["model.layers.2.", "no file has"]),
        ({"tie_word_embeddings": True}, ["lm_head.weight differs", "tie_word_embeddings"]),
    ],
)
def test_what_would_be_silently_wrong_is_refused(changes: dict[str, Any], names: list[str], tmp_path: Path) -> None:
    folder = make_model(tmp_path / "hf", "llama")
    config = read_config(folder) | changes
    (folder / "config.json").write_text(json.dumps({key: v for key, v in config.items() if v is not None}))
    sentence = refusal(folder)
    assert all(name in sentence for name in names), sentence


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step = 2; the decoder here computes only 1"),
        ("qwen3_moe", {"mlp_only_layers": [1]}, "mlp_only_layers = [1]; the decoder here computes dense MLPs only in"),
        ("qwen3_moe", {"mlp_only_layers": 1}, "mlp_only_layers = 1; "),
        ("qwen3_moe", {"num_experts": 5}, "has the shape [6, 64], and the model's is [5, 64]"),
        ("qwen3_moe", {"num_experts": 8}, "has the shape [6, 64], and the model's is [8, 64]"),
        ("qwen3_moe", {"moe_intermediate_size": 32}, "has the shape [24, 64], and the model's is [32, 64]"),
        ("qwen3_moe", {"num_experts_per_tok": 7}, "num_experts_per_tok = 7 is more than num_experts = 6"),
        ("qwen2_moe", {"mlp_only_layers": [0, 1]}, "first_k_dense_replace = 2 leaves none"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise = 0.1; the decoder here computes only 0.0"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv = 8.0; the decoder here computes only None"),
        ("glm4_moe", {"n_group": 2}, "n_group = 2; the decoder here computes only 1"),
        ("glm4_moe", {"n_shared_experts": "one"}, "n_shared_experts = 'one' is not a number"),
    ],
)
def test_mixtures_that_are_not_computed_are_refused(
    name: str, changes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    folder = make_model(tmp_path / "hf", name)
    (folder / "config.json").write_text(json.dumps(read_config(folder) | changes))
    sentence = refusal(folder)
    assert says in sentence, sentence


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    """transformers does not load them either; another layer would be an error."""
    folder = make_model(tmp_path / "hf", "glm4_moe")
    expected = ours_of(folder)(tokens())
    extra = {"model.layers.2.eh_proj.weight": torch.ones(2, 2)}
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"] |= dict.fromkeys(extra, "extra.safetensors")
    save_file(extra, folder / "extra.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "no place" in refusal(folder)
    config = read_config(folder) | {"num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    assert torch.equal(ours_of(folder)(tokens()), expected)


def test_hub_files_may_name_the_experts_otherwise(tmp_path: Path) -> None:
    """transformers reads both keys, whichever the other families have."""
    config = read_config(make_model(tmp_path / "hf", "qwen3_moe"))
    experts = config.pop("num_experts", None) or config.pop("num_local_experts")
    config.pop("num_local_experts", None)
    assert model_of(config | {"num_local_experts": experts}, "here") == model_of(config | {"num_experts": experts}, "")


def test_damaged_files_are_named(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "hf", "llama")
    files = sorted(folder.glob("*.safetensors"))
    whole = files[1].read_bytes()
    files[1].write_bytes(whole[:-100])
    assert files[1].name in refusal(folder)
    files[1].write_bytes(b"no header at all")
    assert files[1].name in refusal(folder)
    files[1].unlink()
    assert f"{files[1].name} is missing" in refusal(folder)
    (folder / "model.safetensors.index.json").write_text("{}")
    assert "model.safetensors.index.json is damaged" in refusal(folder)


def test_pickles_are_never_loaded(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "hf", "llama")
    weights = weights_of(folder)
    for file in [*folder.glob("*.safetensors"), folder / "model.safetensors.index.json"]:
        file.unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    assert "pickles" in refusal(folder)


def test_the_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    from fourfold.data.tokenizer import train_bpe

    folder = make_model(tmp_path / "hf", "llama")
    train_bpe(["some text"], 300, folder / "tokenizer.json")
    sentence = refusal(folder)
    assert "tokenizer.json" in sentence and "another model's tokenizer" in sentence


def test_positions_limit_the_sequence(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "short", "llama", max_position_embeddings=16)
    with pytest.raises(UserError, match="16 positions"):
        run_from(folder, {})
    with pytest.raises(UserError, match="leave one of them out"):
        make_run({"model": {"from_hf": str(folder), "preset": "gpt2"}})
    with pytest.raises(UserError, match="no folder"):
        make_run({"model": {"from_hf": str(tmp_path / "nowhere")}})


def test_ids_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither pickles nor code are fetched; without a network and a cache there is a sentence."""
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(
        UserError, match="there is no folder nobody/nothing, and the Hub has no such model or cannot be reached: "
    ):
        import_huggingface("nobody/nothing", tmp_path / "ours")

    folder = make_model(tmp_path / "hf", "gpt2")
    asked: list[tuple[str, list[str]]] = []

    def download(name: str, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    import_huggingface("somebody/something", tmp_path / "ours")
    assert {name for name, _ in asked} == {"somebody/something"}
    suffixes = {Path(pattern).suffix for _, patterns in asked for pattern in patterns}
    assert suffixes == {".json", ".safetensors", ".model", ".txt", ".jinja"}
