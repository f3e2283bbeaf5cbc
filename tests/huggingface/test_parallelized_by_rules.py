"""Test users' own models with a table of rules, and modules without a rule."""

from __future__ import annotations

import pytest
import torch
from parallelized_models import OWN_RULES, Own, difference, make, make_batch, reference
from pool import Pool
from torch import Tensor, nn

import fourfold
from fourfold.config.run import ParallelConfig
from fourfold.errors import UserError
from fourfold.parallel.grid.grid import Grid
from fourfold.parallel.other_models import plan_styles


def own_body(rank: int, world_size: int, rules: dict[str, str]) -> dict[str, Tensor] | None:
    torch.manual_seed(1)
    model = fourfold.parallelize(Own(), Grid(ParallelConfig(x=2, y=2), "cpu"), rules=rules)
    tokens = torch.arange(40).view(4, 10)
    model.backward(model(tokens).float().logsumexp(-1).sum())
    return model.gather(gradients=True)


def test_a_users_own_model_with_a_table_of_patterns(pool: Pool) -> None:
    gradients = pool.run(4, own_body, OWN_RULES)[0]
    torch.manual_seed(1)
    model = Own()
    model(torch.arange(40).view(4, 10)).logsumexp(-1).sum().backward()
    assert difference(gradients, {name: p.grad for name, p in model.named_parameters()}) < 5e-6


class WithConfig(Own):
    """A model with a configuration but without a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.config = {"layers": 2}

    def forward(self, input_ids: Tensor, **unused: Tensor) -> Tensor:
        assert not unused
        return super().forward(input_ids)


class Strict(WithConfig):
    def forward(self, input_ids: Tensor) -> Tensor:
        return super().forward(input_ids)


def config_body(rank: int, world_size: int) -> None:
    for kind in (Strict, WithConfig):
        model = fourfold.parallelize(kind(), Grid(ParallelConfig(x=2), "cpu"), rules=OWN_RULES)
        assert model(torch.arange(40).view(4, 10)).shape == (4, 10, 64)


def test_a_users_own_model_with_a_config_gets_no_use_cache(pool: Pool) -> None:
    pool.run(2, config_body)


def refused(rank: int, world_size: int, grid: dict[str, int], name: str, changes: dict, rules: dict[str, str]) -> str:
    model = Own() if name == "own" else make(name, **changes)
    with pytest.raises(UserError) as raised:
        fourfold.parallelize(model, Grid(ParallelConfig(**grid), "cpu"), rules=rules)
    return str(raised.value)


WITHOUT_UP = {pattern: style for pattern, style in OWN_RULES.items() if pattern != "*.up"}


@pytest.mark.parametrize(
    ("grid", "name", "changes", "rules", "says"),
    [
        ({"x": 2}, "own", {}, {"table": "embedding"}, "publishes no tensor-parallel plan"),
        (
            {"x": 2},
            "own",
            {},
            WITHOUT_UP,
            "layers.0.mlp.up (Linear, weight [48, 32]), inside a group",
        ),
        ({"x": 2}, "own", {}, OWN_RULES | {"layer.*": "colwise"}, "no module with weights matches the rule 'layer.*'"),
        ({"x": 2}, "own", {}, OWN_RULES | {"*.up": "diagonal"}, "layers.0.mlp.up: the style 'diagonal'"),
        ({"x": 2}, "own", {}, OWN_RULES | {"*.norm": "colwise"}, "layers.0.norm has the type LayerNorm"),
        ({"x": 2}, "llama", {"num_key_value_heads": 1}, {}, "num_key_value_heads = 1 cannot be split over x = 2"),
        ({"x": 2}, "llama", {"vocab_size": 201}, {}, "num_embeddings = 201 cannot be split over x = 2"),
        ({"x": 2}, "llama", {"attention_dropout": 0.1}, {}, "self_attn.attention_dropout = 0.1"),
        ({"cp": 2}, "llama", {}, {}, "cp = 2"),
        ({"x": 2}, "mixtral", {"num_local_experts": 3}, {}, "experts: 3 experts cannot be split over x·y = 2"),
        (
            {"x": 2},
            "mixtral",
            {"router_jitter_noise": 0.1},
            {},
            "mlp.jitter_noise = 0.1 gives different results on ranks that repeat",
        ),
        ({"x": 2}, "llama", {}, {"model.norm": "experts"}, "model.norm (LlamaRMSNorm) is not a stack of experts"),
    ],
)
def test_what_cannot_be_laid_out_is_refused_by_name(
    pool: Pool, grid: dict[str, int], name: str, changes: dict, rules: dict[str, str], says: str
) -> None:
    assert says in pool.run(2, refused, grid, name, changes, rules)[0]


def test_weights_inside_a_sharded_group_need_a_place(pool: Pool) -> None:
    """Each rank has only a part of the gradients of such weights. Qwen3's plan names its head norms. A Llama has no
    such norms."""
    assert "'replicated_with_grad_allreduce' sums it" in pool.run(2, refused, {"x": 2}, "qwen3", {}, HEAD_NORMS)[0]
    # Without the refusal, only the gradients of the head norms would be wrong.
    gradients = pool.run(8, wrong_rule_body, HEAD_NORMS)[0]
    wrong = {n for n, g in gradients.items() if (g - reference("qwen3")[2][n]).norm() > 1e-3 * g.norm()}
    assert wrong == {n for n in gradients if "q_norm" in n or "k_norm" in n}, "the comparison sees it"


def test_a_group_that_the_plan_splits_only_in_part_is_computed_whole(pool: Pool) -> None:
    gradients, styles, warnings = pool.run(4, unnamed_norm_body)[0]
    assert difference(gradients, reference("qwen3")[2]) < 5e-6
    names = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
    assert {styles[f"model.layers.0.self_attn.{name}"] for name in names} == {"replicate"}
    assert styles["model.layers.0.mlp.up_proj"] == "colwise"
    assert warnings == [
        "no style splits 8 modules with matrices, such as model.layers.0.self_attn.q_proj, so every rank of x and y "
        "stores and computes these modules in full"
    ]


def whole_head_body(rank: int, world_size: int) -> dict[str, Tensor] | None:
    torch.manual_seed(1)
    rules = {pattern: style for pattern, style in OWN_RULES.items() if pattern != "head"}
    model = fourfold.parallelize(Own(), Grid(ParallelConfig(x=2, y=2), "cpu"), rules=rules)
    model.backward(model(torch.arange(40).view(4, 10)).logsumexp(-1).sum())
    return model.gather(gradients=True)


def test_a_matrix_without_a_style_is_computed_whole(pool: Pool) -> None:
    gradients = pool.run(4, whole_head_body)[0]
    torch.manual_seed(1)
    model = Own()
    model(torch.arange(40).view(4, 10)).logsumexp(-1).sum().backward()
    assert difference(gradients, {name: p.grad for name, p in model.named_parameters()}) < 5e-6


HEAD_NORMS = {"*.q_norm": "replicate", "*.k_norm": "replicate"}


class Flat(nn.Module):
    """A layer whose module has both a norm and linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 48), nn.Linear(48, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def make_flat() -> Own:
    torch.manual_seed(1)
    model = Own()
    model.layers = nn.ModuleList([Flat(), Flat()])
    return model


def flat_body(rank: int, world_size: int) -> dict[str, Tensor] | None:
    rules = OWN_RULES | {"*.norm": "replicate"}
    model = fourfold.parallelize(make_flat(), Grid(ParallelConfig(x=2, y=2), "cpu"), rules=rules)
    model.backward(model(torch.arange(40).view(4, 10)).logsumexp(-1).sum())
    return model.gather(gradients=True)


def test_a_norm_of_the_residual_may_share_a_group_with_split_layers(pool: Pool) -> None:
    gradients = pool.run(4, flat_body)[0]
    model = make_flat()
    model(torch.arange(40).view(4, 10)).logsumexp(-1).sum().backward()
    assert difference(gradients, {name: p.grad for name, p in model.named_parameters()}) < 5e-6


def unnamed_norm_body(rank: int, world_size: int) -> tuple[dict[str, Tensor] | None, dict[str, str], list[str]]:
    model = make("qwen3")
    model._tp_plan = {key: style for key, style in model._tp_plan.items() if not key.endswith("_norm")}
    model.config.base_model_tp_plan = {}
    warnings: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_styles.log, "warning", lambda text, *parts: warnings.append(text % parts))
        parallel = fourfold.parallelize(model, Grid(ParallelConfig(x=2, y=2), "cpu"))
    tokens, labels = make_batch()
    parallel.backward(parallel(input_ids=tokens, labels=labels).loss)
    return parallel.gather(gradients=True), {each["name"]: each["style"] for each in parallel.layout()}, warnings


def wrong_rule_body(rank: int, world_size: int, rules: dict[str, str]) -> dict[str, Tensor] | None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_styles, "is_of_residual", lambda *_: True)
        model = fourfold.parallelize(make("qwen3"), Grid(ParallelConfig(x=2, y=2, z=2), "cpu"), rules=rules)
    tokens, labels = make_batch()
    model.backward(model(input_ids=model.rows(tokens), labels=model.rows(labels)).loss)
    return model.gather(gradients=True)


class Spare(Own):
    """A layer with a weight that no forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.LayerNorm(32)


def spare_body(rank: int, world_size: int) -> None:
    model = fourfold.parallelize(Spare(), Grid(ParallelConfig(dp=2), "cpu"), rules=OWN_RULES)
    model.backward(model(torch.arange(40).view(4, 10)).logsumexp(-1).sum())
    assert {n for n, p in model.module.named_parameters() if p.grad is None} == {"spare.weight", "spare.bias"}


def test_a_weight_without_a_gradient_stays_without(pool: Pool) -> None:
    pool.run(2, spare_body)
