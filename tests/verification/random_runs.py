"""Draw random run files that cover every setting that affects results, and shrink a failing run file to the smallest
one that still fails."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

from fourfold.config.run import AXES, PipelineSchedule, RunConfig
from fourfold.errors import UserError
from fourfold.run_file.load import make_run

Table = dict[str, dict[str, Any]]

MOST_RANKS = 8
PRECISIONS = ({"precision": "fp16"}, {"precision": "bf16"}, {"precision": "bf16", "reduce_dtype": "bf16"})


def random_table(seed: int) -> Table:
    """Return the sections of a legal run file on two to eight processes. The seed alone determines them."""
    table = _random_table(random.Random(seed))
    changes = {
        "latents": _with_latents,
        "some linear attention": _with_linear_attention,
        "multi-token prediction": _with_predictions,
    }
    for name, change in changes.items():
        draw = random.Random(f"{name} of {seed}")
        changed = change(draw, table)
        table = changed if draw.random() < 0.2 and is_legal(changed) else table
    return table


def _random_table(draw: random.Random) -> Table:
    while True:
        table = _draw(draw)
        if is_legal(table):
            if "num_experts" not in table["model"]:
                table["training"]["tuned_products"] = draw.choice(("off", "off", "cached"))
            if draw.random() < 0.2:
                table["ema"] = {"decay": draw.choice((0.5, 0.9))}
            pairs = {**table, "dpo": {"beta": 0.2}, "data": {"format": "preferences", "train": [{"path": "nowhere"}]}}
            table = pairs if draw.random() < 0.2 and is_legal(pairs) else table
            if "precision" not in table["training"] and draw.random() < 0.25:
                lower = {**table, "training": table["training"] | draw.choice(PRECISIONS)}
                return lower if is_legal(lower) else table
            return table


def run_of(table: Table, folder: Path) -> RunConfig:
    """Return the run file of a table. Raise ``UserError`` if it is not legal."""
    return make_run({**table, "output_dir": str(folder)})


def is_legal(table: Table) -> bool:
    try:
        ranks = run_of(table, Path()).parallel.world_size
    except UserError:
        return False
    return ranks <= MOST_RANKS


def shrink(table: Table, fails: Callable[[Table], bool]) -> Table:
    """Return a smaller run file that fails. The function removes a section or a key, or halves a number. The
    function repeats this as long as the smaller run file is legal and still fails."""
    while (smaller := next((t for t in _smaller(table) if is_legal(t) and fails(t)), None)) is not None:
        table = smaller
    return table


def _smaller(table: Table) -> Iterator[Table]:
    for section, keys in table.items():
        if section not in ("model", "training", "data"):
            yield {name: other for name, other in table.items() if name != section}
        for key, value in keys.items():
            yield {**table, section: {k: v for k, v in keys.items() if k != key}}
            if type(value) is int and value > 1:
                yield {**table, section: {**keys, key: value // 2}}
                yield {**table, section: {**keys, key: value - 1}}


def _draw(draw: random.Random) -> Table:
    model, grid = _model(draw), _grid(draw)
    data = {"source": "python-stdlib", "mask_documents": draw.random() < 0.4}
    table: Table = {"model": model, "data": data, "parallel": grid, "training": _training(draw, grid)}
    table["optimizer"] = {"weight_decay": draw.choice((0.0, 0.1)), "max_grad_norm": draw.choice((0.1, 1.0, 100.0))}
    table["optimizer"]["name"] = draw.choice(("adamw", "adamw", "muon", "lion"))
    table["lr_scheduler"] = {
        "decay_style": draw.choice(("cosine", "linear", "wsd", "constant")),
        "warmup_steps": draw.choice((0, 100)),
    }
    table["overlap"] = {
        "input_gradients": draw.random() < 0.7,
        "gate_sum": draw.random() < 0.7,
        "weight_prefetch": draw.choice((0, 1, 1, 3)),
        "shards_per_node": _per_node(draw, grid),
    }
    table["activation_checkpoint"] = _recompute(draw)
    if draw.random() < 0.3:
        strategy = draw.choice(("hash", "hash-table", "static", "random"))
        goldfish = {"strategy": strategy, "k": draw.choice((2, 3, 4)), "h": draw.choice((1, 2, 5))}
        table["masks"] = {"goldfish": goldfish | {"start_step": draw.choice((0, 5))}}
    if draw.random() < 0.15:
        table["lora"] = {"rank": draw.choice((1, 4)), "alpha": 8.0}
        if draw.random() < 0.5:
            table["lora"]["targets"] = draw.sample(("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"), 3)
    if draw.random() < 0.2:
        parameters = ["layers.0.*"] if "lora" in table else ["layers.0.*", "*norm*"]
        group = {"parameters": parameters, "lr_ratio": 0.3, "weight_decay": draw.choice((0.0, 0.5))}
        table["optimizer"]["groups"] = [group]
    if draw.random() < 0.2:
        table["training"] |= {"precision": "bf16", "master_weights": "bf16"}
        table["optimizer"]["stochastic_rounding"] = draw.random() < 0.5
    if draw.random() < 0.4:
        sequences = table["training"]["micro_batch_size"]
        table["overlap"]["batch_parts"] = draw.choice([n for n in range(1, sequences + 1) if sequences % n == 0])
    elif draw.random() < 0.25:
        table["overlap"]["batch_parts"] = draw.choice((2, 3, 4))
    if draw.random() < 0.4:
        _add_experts(draw, table)
    return table


def _add_experts(draw: random.Random, table: Table) -> None:
    """Make the model a mixture of experts. ep is 1, or divides the experts over some or all of the possible ranks."""
    model, grid = table["model"], table["parallel"]
    experts = draw.choice((2, 4, 6, 8))
    model |= {"mlp": draw.choice(("swiglu", "geglu")), "mlp_bias": False, "num_experts": experts}
    model.pop("gelu_approximation", None)
    model |= {
        "num_experts_per_tok": draw.choice([n for n in (1, 2, 3, 8) if n <= experts]),
        "moe_intermediate_size": draw.choice((12, 24, 48)),
        "router_score": draw.choice(("softmax", "sigmoid")),
        "norm_topk_prob": draw.random() < 0.6,
        "router_bias": draw.random() < 0.4,
        "routed_scaling_factor": draw.choice((1.0, 2.5)),
        "shared_expert_intermediate_size": draw.choice((0, 0, 24)),
        "first_k_dense_replace": draw.choice((0, 0, 1)),
    }
    if model["shared_expert_intermediate_size"]:
        model["shared_expert_gate"] = draw.random() < 0.5
    table["moe"] = {
        "capacity_factor": draw.choice((0.0, 0.0, 0.7, 1.25)),
        "load_balancing_loss": draw.choice((0.0, 0.01, 0.5)),
        "z_loss": draw.choice((0.0, 0.01)),
    }
    if model["router_bias"] and "lora" not in table:
        table["moe"]["bias_update_rate"] = draw.choice((0.001, 0.1))
    ranks = grid["dp"] * grid["cp"] * grid["z"]
    grid["ep"] = draw.choice([n for n in range(1, ranks + 1) if ranks % n == 0 and experts % n == 0])
    table["overlap"]["batch_parts"] = 1
    if "lora" in table:
        table["lora"]["targets"] = draw.sample(("q_proj", "k_proj", "v_proj", "o_proj"), 2)


def _model(draw: random.Random) -> dict[str, Any]:
    kv_heads = draw.choice((1, 2, 3, 4))
    heads, head_dim = kv_heads * draw.choice((1, 2, 3)), draw.choice((8, 16))
    model: dict[str, Any] = {
        "vocab_size": draw.choice((97, 128, 257)),
        "hidden_size": draw.choice((heads * head_dim, 48, 60, 64)),
        "num_hidden_layers": draw.choice((1, 2, 3, 4)),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": draw.choice((48, 72, 120)),
        "max_position_embeddings": draw.choice((48, 96)),
        "norm": draw.choice(("rmsnorm", "layernorm")),
        "mlp": draw.choice(("swiglu", "geglu", "gelu")),
        "position_embedding": draw.choice(("rope", "rope", "learned")),
        "pad_vocab_size_to_multiple_of": draw.choice((1, 12, 128)),
    }
    for key in ("tie_word_embeddings", "attention_bias", "attention_output_bias", "mlp_bias", "qk_norm"):
        model[key] = draw.random() < 0.4
    if model["qk_norm"]:
        model["qk_norm_over"] = draw.choice(("head", "all_heads"))
    if draw.random() < 0.3:
        # With a window of one token, the gradients of queries and keys would be zero, so rounding errors could not be
        # compared.
        model["sliding_window"] = draw.choice((2, 5, 12, 40))
        kinds = ("sliding_attention", "full_attention")
        model["layer_types"] = [draw.choice(kinds) for _ in range(draw.choice((0, 1, 2, 3)))]
        if model["position_embedding"] == "rope" and draw.random() < 0.5:
            model["rope_local_base_freq"] = 300.0
    model["norm_placement"] = draw.choice(("before", "before", "after", "around"))
    model["query_pre_attn_scalar"] = draw.choice((head_dim, head_dim, 12))
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        model[key] = draw.choice((0.0, 0.0, 0.0, 0.8))
    model["parallel_residual"] = model["norm_placement"] == "before" and draw.random() < 0.2
    model["scale_embeddings"] = draw.random() < 0.2
    if model["norm"] == "rmsnorm":
        model["zero_centered_norm"] = draw.random() < 0.3
    if model["mlp"] != "swiglu":
        model["gelu_approximation"] = draw.choice(("tanh", "none"))
    if model["position_embedding"] == "rope":
        model["partial_rotary_factor"] = draw.choice((1.0, 1.0, 0.5))
        if draw.random() < 0.2:
            model["rope_scaling"] = {"rope_type": "linear", "factor": 2.0}
    return model


NOT_OF_LATENTS = {
    "attention_bias", "attention_output_bias", "qk_norm", "qk_norm_over", "sliding_window", "layer_types", "head_dim",
    "rope_local_base_freq", "partial_rotary_factor",
}  # fmt: skip


def _with_latents(draw: random.Random, table: Table) -> Table:
    """Return a run file whose model has latent attention."""
    model = {key: value for key, value in table["model"].items() if key not in NOT_OF_LATENTS}
    model |= {
        "position_embedding": "rope",
        "num_key_value_heads": model["num_attention_heads"],
        "kv_lora_rank": draw.choice((12, 24)),
        "q_lora_rank": draw.choice((0, 24)),
        "qk_nope_head_dim": draw.choice((4, 8)),
        "qk_rope_head_dim": draw.choice((4, 12)),
        "v_head_dim": draw.choice((6, 8)),
    }
    latent = {**table, "model": model, "overlap": {**table["overlap"], "batch_parts": 1}}
    latent["training"] = {**table["training"], "tuned_products": "off"}
    if "lora" in table:
        latent["lora"] = {key: value for key, value in table["lora"].items() if key != "targets"}
    return latent


def _with_linear_attention(draw: random.Random, table: Table) -> Table:
    """Give some layers of the model linear attention, and return the changed run file. The run file is not legal if the
    model has latent attention."""
    grid = table["parallel"]
    keys = grid["x"] * grid["y"] * grid["cp"] * draw.choice((1, 2))
    kinds = table["model"].get("layer_types") or ["full_attention"]
    model = table["model"] | {
        "layer_types": draw.sample(["linear_attention", *kinds], 1 + len(kinds)),
        "linear_num_key_heads": keys,
        "linear_num_value_heads": keys * draw.choice((1, 2, 3)),
        "linear_key_head_dim": draw.choice((4, 6)),
        "linear_value_head_dim": draw.choice((5, 8)),
        "linear_conv_kernel_dim": draw.choice((1, 3, 4)),
        "attention_output_gate": draw.random() < 0.5,
    }
    hybrid = {**table, "model": model, "overlap": {**table["overlap"], "batch_parts": 1}}
    hybrid["training"] = {**table["training"], "tuned_products": "off"}
    if "lora" in table:
        hybrid["lora"] = {key: value for key, value in table["lora"].items() if key != "targets"}
    return hybrid


def _with_predictions(draw: random.Random, table: Table) -> Table:
    """Return a run file whose model predicts further tokens. The run file is not legal if it has LoRA, DPO, or certain
    other settings."""
    model = table["model"] | {"num_nextn_predict_layers": draw.choice((1, 1, 2))}
    weight = {"mtp_loss_weight": draw.choice((0.1, 0.5))}
    training = {**table["training"], **weight, "tuned_products": "off", "compile": False}
    return {**table, "model": model, "training": training, "overlap": {**table["overlap"], "batch_parts": 1}}


def _grid(draw: random.Random) -> dict[str, Any]:
    """Draw axes of 1 to 4. The first axes are as likely to be large as the last ones."""
    sizes = dict.fromkeys(AXES, 1)
    left = draw.choice((2, 3, 4, 4, 6, 8, 8, 8))
    for axis in draw.sample(AXES, len(AXES)):
        fitting = [size for size in (1, 2, 3, 4) if left % size == 0]
        sizes[axis] = draw.choice(fitting)
        left //= sizes[axis]
    grid: dict[str, Any] = {**sizes, "zero": draw.choice((0, 0, 1, 2, 3))}
    if sizes["cp"] > 1:
        grid["cp_method"] = draw.choice(("auto", "ring", "ulysses"))
    if sizes["pp"] > 1:
        grid["schedule"] = draw.choice(("1F1B", *get_args(PipelineSchedule)))
    return grid


def _per_node(draw: random.Random, grid: dict[str, Any]) -> int:
    """Draw how many ranks of a shard group are in one node. If possible, this is usually more than one but not all."""
    ranks = grid["z"] * (grid["dp"] * grid["cp"] if grid["zero"] else 1)
    return draw.choice([1, ranks, *(2 * [n for n in range(2, ranks) if ranks % n == 0])])


def _training(draw: random.Random, grid: dict[str, Any]) -> dict[str, Any]:
    micro_batch = draw.choice((1, 2, 3, 4))
    at_once = micro_batch * grid["dp"] * grid["z"]
    return {
        "micro_batch_size": micro_batch,
        "global_batch_size": at_once * draw.choice((1, 2, 4, 6) if grid["pp"] > 1 else (1, 2, 3)),
        "seq_length": draw.choice((24, 32, 48)),
        "train_steps": 100,
        "seed": draw.randrange(1000),
    }


def _recompute(draw: random.Random) -> dict[str, Any]:
    mode = draw.choice(("none", "none", "selective", "full"))
    if mode == "none":
        return {"mode": mode}
    table: dict[str, Any] = {"mode": mode, "every": draw.choice((1, 2))}
    if mode == "full":
        return table | {"offload": draw.random() < 0.4}
    modules = ("attention", "mlp", "norms", "gathers")
    return table | {"modules": draw.sample(modules, draw.randint(1, 4))}
