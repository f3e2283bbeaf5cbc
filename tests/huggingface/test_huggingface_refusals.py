"""fourfold refuses Hugging Face models that are damaged, or for which it would silently compute wrong results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_huggingface import make_model, ours_of, tokens, weights_of
from tokenizers import Tokenizer

from fourfold.config.model import ModelConfig
from fourfold.config.presets import PRESETS
from fourfold.errors import UserError
from fourfold.huggingface.architectures.config_json import from_huggingface, model_of, read_config
from fourfold.huggingface.architectures.written_config import config_of
from fourfold.huggingface.import_model import import_huggingface
from fourfold.huggingface.tokenizer_file import added_beyond

pytest.importorskip("transformers")


def refusal(folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        import_huggingface(str(folder), folder.parent / "ours")
    assert not (folder.parent / "ours").exists()
    assert sorted(p.name for p in folder.parent.iterdir()) == ["hf"]
    return str(caught.value)


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"model_type": "phimoe"}, ["phimoe", "sparsemixer"]),
        ({"model_type": "phi"}, ["phi", "parallel attention and MLP"]),
        ({"model_type": "falcon", "architectures": None}, ["new_decoder_architecture = False"]),
        ({"model_type": "gemma3"}, ["gemma3", "images"]),
        ({"model_type": "mamba"}, ["mamba", "llama"]),
        ({"model_type": ["llama"]}, ["model_type = ['llama']"]),
        ({"hidden_act": ["silu"]}, ["hidden_act = ['silu']"]),
        ({"rope_parameters": None, "rope_theta": "a"}, ["rope_theta = 'a' is not a number"]),
        ({"rope_parameters": [1]}, ["rope_parameters = [1] is not a table"]),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": "two"}},
            ["rope_parameters.factor = 'two' is not a positive number"],
        ),
        ({"architectures": ["LlamaForSequenceClassification"]}, ["LlamaForSequenceClassification", "LlamaForCausalLM"]),
        ({"hidden_act": "gelu"}, ["hidden_act = 'gelu'"]),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, ["longrope"]),
        ({"rope_parameters": None, "partial_rotary_factor": 0.5}, ["partial_rotary_factor = 0.5"]),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "mscale": 0.7}}, ["mscale"]),
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
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step = 2; fourfold supports only 1"),
        ("qwen3_moe", {"mlp_only_layers": [1]}, "mlp_only_layers = [1]; fourfold supports dense MLPs only in"),
        ("qwen3_moe", {"mlp_only_layers": 1}, "mlp_only_layers = 1; "),
        ("qwen3_moe", {"num_local_experts": 5}, "has the shape [6, 64], but the model needs the shape [5, 64]"),
        ("qwen3_moe", {"num_local_experts": 8}, "has the shape [6, 64], but the model needs the shape [8, 64]"),
        ("qwen3_moe", {"moe_intermediate_size": 32}, "has the shape [24, 64], but the model needs the shape [32, 64]"),
        ("qwen3_moe", {"num_experts_per_tok": 7}, "num_experts_per_tok = 7 is more than num_experts = 6"),
        ("qwen2_moe", {"mlp_only_layers": [0, 1]}, "mlp_only_layers = [0, 1] with num_hidden_layers = 2; an MoE model"),
        ("mixtral", {"num_local_experts": None}, "num_local_experts = None; this family has only MoE models"),
        ("mixtral", {"num_local_experts": 0}, "num_local_experts = 0; this family has only MoE models"),
        ("glm4_moe", {"n_routed_experts": None}, "n_routed_experts = None; this family has only MoE models"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise = 0.1; fourfold supports only 0.0"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv = 8.0; fourfold supports only None"),
        ("glm4_moe", {"n_group": 2}, "n_group = 2; fourfold supports only 1"),
        ("glm4_moe", {"n_shared_experts": "one"}, "n_shared_experts = 'one' is not an integer"),
        ("exaone_moe", {"num_shared_experts": None}, "num_shared_experts = None is not an integer"),
        ("hy_v3", {"mlp_layer_types": ["sparse", "dense"]}, "mlp_layer_types = ['sparse', 'dense']; fourfold"),
        ("glm4_moe_lite", {"mlp_layer_types": ["dense"] * 2}, "mlp_layer_types = ['dense', 'dense'] with num_hidden_"),
        ("granite_swa", {"layer_rope_theta": [1e4, 1e5]}, "layer_rope_theta = [10000.0, 100000.0]; give 2 numbers"),
        ("granite_swa", {"layer_rope_theta": [1e4]}, "layer_rope_theta = [10000.0]; give 2 numbers"),
        ("gpt_neo", {"attention_types": [["global", "x"]]}, "attention_types = "),
        ("hyperclovax", {"logits_scaling": 0}, "logits_scaling = 0 is not a positive number"),
        ("hyperclovax", {"use_post_norm": False}, "use_post_norm = False; fourfold supports only True"),
        ("minimax_m2", {"rotary_dim": "8"}, "rotary_dim = '8' is not an integer"),
        ("falcon", {"num_ln_in_parallel_attn": 1}, "num_ln_in_parallel_attn = 1; fourfold supports only 2"),
        ("gpt_bigcode", {"multi_query": False}, "multi_query = False; fourfold supports only True"),
    ],
)
def test_mixtures_that_are_not_computed_are_refused(
    name: str, changes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    folder = make_model(tmp_path / "hf", name)
    (folder / "config.json").write_text(json.dumps(read_config(folder) | changes))
    sentence = refusal(folder)
    assert says in sentence, sentence


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"swiglu_limit": None}, "swiglu_limit is null"),
        ({"num_experts_per_tok": None}, "num_experts_per_tok is null"),
        ({"sliding_window": None, "layer_types": ["sliding_attention", "full_attention"]}, "sliding_window is null"),
        (
            {"rope_parameters": {kind: {"rope_type": "default"} for kind in ("full_attention", "sliding_attention")}},
            "a table per kind of layer",
        ),
        ({"layer_types": ["full_attention"] * 5}, "layer_types has 5 entries, but num_hidden_layers = 2; give one"),
        ({"sliding_window": 0}, "sliding_window = 0 is not an integer of at least 1"),
        ({"sliding_window": "128"}, "sliding_window = '128' is not an integer"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters has no factor, but rope_type 'yarn' needs one"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": None}}, "rope_scaling has no factor"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 0}}, r"rope_parameters\.factor = 0 is not a positive"),
    ],
)
def test_what_transformers_cannot_read_in_gpt_oss_is_refused(
    changes: dict[str, Any], names: str, tmp_path: Path
) -> None:
    config = read_config(make_model(tmp_path / "hf", "gpt_oss")) | changes
    with pytest.raises(UserError, match=names):
        model_of(config, "config.json")


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("deepseek_v3", {"norm_topk_prob": None}, "norm_topk_prob is null"),
        ("deepseek_v3", {"n_group": None}, "n_group is null"),
        ("deepseek_v3", {"kv_lora_rank": None}, "kv_lora_rank is null"),
        ("deepseek_v3", {"kv_lora_rank": 0}, "kv_lora_rank = 0 is not a width"),
        ("deepseek_v3", {"head_dim": 2}, "head_dim = 2; in this family it is qk_rope_head_dim = 4"),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave = False"),
        ("deepseek_v3", {"num_key_value_heads": 4}, "num_key_value_heads = 4 does not work with kv_lora_rank"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method = 'noaux_tc'"),
        ("youtu", {"head_dim": 2}, "head_dim = 2; in this family it is qk_rope_head_dim = 4"),
    ],
)
def test_other_latent_attention_is_refused(name: str, changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    config = read_config(make_model(tmp_path / "hf", name)) | changes
    with pytest.raises(UserError, match=says):
        model_of(config, "config.json")


def test_rotary_embeddings_of_no_channel_are_refused(tmp_path: Path) -> None:
    """transformers rotates nothing in such a model. Our decoder would silently rotate whole heads."""
    folder = make_model(tmp_path / "hf", "gpt_neox")
    config = {key: v for key, v in read_config(folder).items() if key != "rope_parameters"} | {"rotary_pct": 0.0}
    with pytest.raises(UserError, match=r"partial_rotary_factor = 0.0: must be a number > 0 and ≤ 1, such as 1.0"):
        model_of(config, "here")


def test_a_family_that_cannot_stretch_so_is_not_written() -> None:
    sizes = PRESETS["llama-tiny"] | {"partial_rotary_factor": 0.5}
    assert config_of(ModelConfig(**sizes))["model_type"] == "phi3"
    stretched = ModelConfig(**sizes, rope_scaling={"rope_type": "linear", "factor": 2.0})
    with pytest.raises(UserError, match="no Hugging Face model of model_type 'phi3'"):
        config_of(stretched, "phi3")
    assert config_of(stretched)["model_type"] == "glm"


def test_helium_is_not_written_with_heads_wider_than_the_residual_stream() -> None:
    """Helium's output projection has hidden_size inputs, whatever head_dim is."""
    sizes = PRESETS["llama-tiny"]
    assert config_of(ModelConfig(**sizes), "helium")["head_dim"] == ModelConfig(**sizes).head_dim
    with pytest.raises(UserError, match="no Hugging Face model of model_type 'helium'"):
        config_of(ModelConfig(**sizes | {"head_dim": 2 * ModelConfig(**sizes).head_dim}), "helium")


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    """transformers does not load these layers either. Any other additional layer is an error."""
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


def test_a_head_that_differs_from_the_tied_embedding_in_its_last_row_is_refused(tmp_path: Path) -> None:
    """transformers would use the stored head."""
    folder = make_model(tmp_path / "hf", "llama gqa tied")
    file = next(f for f in folder.glob("*.safetensors") if "model.embed_tokens.weight" in load_file(f))
    tensors = load_file(file)
    head = tensors["model.embed_tokens.weight"].clone()
    index_file = folder / "model.safetensors.index.json"
    index = json.loads(index_file.read_text())
    index["weight_map"]["lm_head.weight"] = file.name
    index_file.write_text(json.dumps(index))
    save_file(tensors | {"lm_head.weight": head}, file)
    ours_of(folder)
    head[-1, -1] += 1
    save_file(tensors | {"lm_head.weight": head}, file)
    assert "lm_head.weight differs from model.embed_tokens.weight" in refusal(folder)


def test_rope_scaling_wins_over_rope_parameters_as_in_transformers(tmp_path: Path) -> None:
    import transformers

    folder = make_model(tmp_path / "hf", "qwen3")
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    (folder / "config.json").write_text(json.dumps(read_config(folder) | {"rope_scaling": scaling}))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        torch.testing.assert_close(ours_of(folder)(tokens()), theirs(tokens()).logits, rtol=1e-4, atol=1e-4)
    (folder / "config.json").write_text(json.dumps(read_config(folder) | {"is_causal": False}))
    assert "is_causal = False" in refusal(folder)


def test_added_tokens_without_a_row_in_the_embedding_are_named_and_ordinary_tokens_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """For example, Llama 2 and CodeLlama have a pad token without a row."""
    from fourfold.data.tokenizer import train_bpe

    folder = make_model(tmp_path / "hf", "llama", vocab_size=257)
    train_bpe(["some text"], 257, folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["<pad>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    import_huggingface(str(folder), tmp_path / "imported")
    assert "adds '<pad>' beyond the 257 rows" in capsys.readouterr().err
    assert added_beyond(ModelConfig(**from_huggingface({"from_hf": str(folder)}))) == 1


def test_the_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    from fourfold.data.tokenizer import train_bpe

    folder = make_model(tmp_path / "hf", "llama")
    train_bpe(["some text"], 300, folder / "tokenizer.json")
    sentence = refusal(folder)
    assert "tokenizer.json" in sentence and "another model's tokenizer" in sentence
