"""Check whether a run's grid fits its model, and determine how the ranks of the axes y and cp share attention."""

from typing import Literal, NamedTuple

from fourfold.config.expected_values import shown
from fourfold.config.layout_sizes import Sizes
from fourfold.config.legality import RULES
from fourfold.config.run import RunConfig
from fourfold.errors import UserError

AttentionSplit = Literal["heads", "batch", "sequence"]
ContextMethod = Literal["ring", "ulysses"]

CHUNK_LOGITS = {"cpu": 1 << 20, "cuda": 1 << 27}
"""Number of logits that one rank computes at once, by device type. On a CPU, this many logits fit into the cache. On a
GPU, this many logits are enough to use all tensor cores."""

LINEAR_CHUNK = 64
"""Number of tokens that linear attention processes at once. Larger chunks make larger matmuls, but need more FLOPs per
token."""


class MatmulSizes(NamedTuple):
    """The three sizes of one linear layer's matmul on one rank. The matmul is [tokens, inputs] × [inputs, outputs]."""

    tokens: int
    """Number of input rows in one matmul of the forward pass."""
    outputs: int
    """Number of output features."""
    inputs: int
    """Number of input features."""


def matmul_sizes(run: RunConfig) -> dict[str, MatmulSizes]:
    """Return the matmul sizes of each linear layer in a block with a dense MLP, by the layer's name."""
    model, grid, training = run.model, run.parallel, run.training
    parts = run.overlap.batch_parts if grid.x * grid.y > 1 else 1
    tokens = training.micro_batch_size * training.seq_length // grid.cp // parts
    hidden, inner = model.hidden_size, model.intermediate_size
    queries, keys = (heads * model.head_dim for heads in (model.num_attention_heads, model.num_key_value_heads))
    from_residual = {"q_proj": queries, "k_proj": keys, "v_proj": keys, "up_proj": inner}
    if model.gated_mlp:
        from_residual["gate_proj"] = inner
    sizes = {name: MatmulSizes(tokens, out // grid.x, hidden // grid.y) for name, out in from_residual.items()}
    for name, features in (("o_proj", queries), ("down_proj", inner)):
        sizes[name] = MatmulSizes(tokens, hidden // grid.y, features // grid.x)
    return sizes


def check_layout(run: RunConfig) -> None:
    """Raise ``UserError`` if a run's grid or settings do not fit its model.

    The run must satisfy all ``RULES``. For example, the size of an axis must divide each number that the axis splits.
    Also, ``training.compile`` and ``training.tuned_products`` must work with the run's other settings.
    """
    sizes = Sizes.of(run)
    for rule in RULES:
        if rule.broken(sizes):
            raise UserError(rule.sentence(run, sizes))
    training, grid = run.training, run.parallel
    not_compiled = ("num_experts", "linear_num_key_heads", "num_nextn_predict_layers")
    not_tuned = (*not_compiled, "kv_lora_rank", "attention_output_gate")
    for key, off, others in (("compile", False, not_compiled), ("tuned_products", "off", not_tuned)):
        found = [f"model.{other} = {shown(getattr(run.model, other))}" for other in others if getattr(run.model, other)]
        if found and getattr(training, key) != off:
            raise UserError(
                f"training.{key} = {shown(getattr(training, key))} does not work with {found[0]}; training.{key} = "
                f"{shown(off)} works"
            )
    if run.model.num_nextn_predict_layers:
        _check_predictions(run)
    if training.tuned_products != "off":
        if training.float8 != "none":
            raise UserError(
                f"training.float8 = '{training.float8}' chooses the layouts of its matmuls itself; "
                "set training.tuned_products = 'off'"
            )
        if training.compile and grid.x * grid.y * grid.cp == 1:
            raise UserError(
                "training.compile = true chooses the layouts of all matmuls itself if x, y, and cp are 1; "
                "set training.tuned_products = 'off', or compile = false"
            )


def _check_predictions(run: RunConfig) -> None:
    """Raise ``UserError`` if layers for multi-token prediction do not work with the run's other settings."""
    refused = {
        f"lora.rank = {run.lora.rank}": run.lora.rank > 0,
        f"dpo.beta = {run.dpo.beta}": run.dpo.beta > 0,
        f"model.from_hf = '{run.model.from_hf}', an import without these layers": run.model.from_hf is not None,
    }
    if found := [setting for setting, is_refused in refused.items() if is_refused]:
        raise UserError(
            f"model.num_nextn_predict_layers = {run.model.num_nextn_predict_layers} does not work with {found[0]}; "
            "num_nextn_predict_layers = 0 works"
        )


def attention_split(run: RunConfig) -> AttentionSplit:
    """Return what the ranks of the tensor axis y split in attention.

    Returns:
        The first of these that the ranks can divide equally:

        - "heads", if x·y divides the number of heads
        - "batch", if y divides the number of sequences in a micro-batch, or in a batch part if there are batch parts
        - "sequence": the queries of each sequence
    """
    sizes = Sizes.of(run)
    return "heads" if sizes.whole_heads else "sequence" if sizes.splits_queries else "batch"


def context_method(run: RunConfig) -> ContextMethod:
    """Return how the ranks of the context axis cp share attention.

    ``parallel.cp_method = "auto"`` becomes "ulysses" if the heads can be divided equally, and "ring" otherwise.
    """
    if run.parallel.cp_method != "auto":
        return run.parallel.cp_method
    return "ring" if Sizes.of(run).uneven_heads else "ulysses"
