"""A model of transformers on the grid, in a loop of one's own: it computes what it did before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from tiny_huggingface import SIZES
from torch import Tensor, nn

import fourfold
from fourfold.config.run import ParallelConfig
from fourfold.errors import UserError
from fourfold.parallel import tensor_plan
from fourfold.parallel.grid import Grid

transformers = pytest.importorskip("transformers")

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"num_key_value_heads": 4, "vocab_size": 208, "pad_token_id": 3}),
    "qwen3": (
        "Qwen3Config",
        {"num_key_value_heads": 4, "head_dim": 16, "vocab_size": 208, "tie_word_embeddings": True},
    ),
    "mistral": ("MistralConfig", {"num_key_value_heads": 4, "sliding_window": 8, "vocab_size": 208}),
    "gpt_neox": ("GPTNeoXConfig", {"vocab_size": 208, "attention_bias": True, "intermediate_size": 96}),
    "phi3": ("Phi3Config", {"num_key_value_heads": 4, "vocab_size": 208}),
    "gemma": ("GemmaConfig", {"num_key_value_heads": 2, "head_dim": 8, "vocab_size": 208}),
    "olmo2": ("Olmo2Config", {"num_key_value_heads": 4, "vocab_size": 208}),
}
GRIDS = [{"x": 2, "y": 2, "z": 2}, {"x": 4, "dp": 2}, {"y": 2, "z": 2, "dp": 2, "zero": 3}, {"x": 2, "y": 4}]


def make(name: str, **changes: Any) -> nn.Module:
    """The same random model wherever it is made, with no parameter that does not matter."""
    kind, keys = FAMILIES[name]
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**(SIZES | keys | changes)))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.3 * torch.randn(parameter.shape)
    return model.train()


def make_batch() -> tuple[Tensor, Tensor]:
    """Tokens [8, 16] with some of the padding, and labels that are masked unevenly."""
    generator = torch.Generator().manual_seed(6)
    tokens = torch.randint(4, 200, (8, 16), generator=generator)
    tokens[:, 3] = 3
    labels = tokens.clone()
    for row in range(8):
        labels[row, : row + 2] = -100
    return tokens, labels


def reference(name: str) -> tuple[float, float, dict[str, Tensor], dict[str, Tensor]]:
    """Loss, gradient norm, gradients, and the weights after a step, of the untouched model on one process."""
    model, (tokens, labels) = make(name), make_batch()
    loss = model(input_ids=tokens, labels=labels).loss
    loss.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return loss.item(), norm.item(), gradients, {n: p.detach() for n, p in model.named_parameters()}


def difference(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    assert got.keys() == want.keys()
    return max(((got[n] - want[n]).norm() / want[n].norm()).item() for n in want)


def step_body(
    rank: int, world_size: int, name: str, grid: dict[str, int], micro_batches: int
) -> tuple[float, float, dict[str, Tensor], dict[str, Tensor]] | None:
    model = fourfold.parallelize(make(name), Grid(ParallelConfig(**grid), "cpu"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens, labels = make_batch()
    kept = sum(model.count(model.rows(part)) for part in labels.chunk(micro_batches))
    loss = 0.0
    for part in range(micro_batches):
        mine = [model.rows(each.chunk(micro_batches)[part]) for each in (tokens, labels)]
        out = model(input_ids=mine[0], labels=mine[1], num_items_in_batch=kept if micro_batches > 1 else None)
        model.backward(out.loss, last=part == micro_batches - 1)
        loss += out.loss.item()
    gradients = model.gather(gradients=True)
    norm = model.clip_grad_norm_(0.5)
    optimizer.step()
    optimizer.zero_grad()
    weights = model.gather()
    return None if rank else (loss, norm.item(), gradients, weights)


def check(pool: Pool, name: str, grid: dict[str, int], micro_batches: int = 1) -> None:
    ranks = ParallelConfig(**grid).world_size
    loss, norm, gradients, weights = pool.run(ranks, step_body, name, grid, micro_batches)[0]
    expected = reference(name)
    assert loss == pytest.approx(expected[0], rel=2e-6)
    assert norm == pytest.approx(expected[1], rel=1e-5)
    assert difference(gradients, expected[2]) < 5e-6
    assert difference(weights, expected[3]) < 1e-6


FAST = {("qwen3", 0), ("mistral", 2), ("gpt_neox", 3)}
"""A family each, and a grid each."""


@pytest.mark.parametrize(
    ("name", "grid"),
    [
        pytest.param(name, grid, id=f"{name}-{grid}", marks=[] if (name, number) in FAST else [pytest.mark.slow])
        for name in ("llama", "qwen3", "mistral", "gpt_neox")
        for number, grid in enumerate(GRIDS)
    ],
)
def test_loss_and_gradients_are_those_of_the_untouched_model(pool: Pool, name: str, grid: dict[str, int]) -> None:
    check(pool, name, grid)


@pytest.mark.parametrize(
    ("name", "grid"),
    [
        ("phi3", {"x": 2, "y": 2}),
        pytest.param("phi3", GRIDS[0], marks=pytest.mark.slow),
        ("gemma", {"x": 2, "y": 2}),
        pytest.param("gemma", GRIDS[0], marks=pytest.mark.slow),
        ("olmo2", {"x": 2, "y": 2}),
        pytest.param("olmo2", GRIDS[3], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_plans_with_gathered_features_are_exact_too(pool: Pool, name: str, grid: dict[str, int]) -> None:
    check(pool, name, grid)


@pytest.mark.parametrize(
    "grid",
    [
        pytest.param(GRIDS[0], marks=pytest.mark.slow),
        {"x": 2, "dp": 2},
        pytest.param({"x": 2, "y": 2, "dp": 2}, marks=pytest.mark.slow),
        {"z": 4, "dp": 2, "zero": 1},
    ],
    ids=str,
)
def test_micro_batches_with_uneven_masks_add_up(pool: Pool, grid: dict[str, int]) -> None:
    check(pool, "qwen3", grid, micro_batches=2 if grid.get("z", 1) < 4 else 1)


def checkpoint_body(rank: int, world_size: int, grid: dict[str, int], folder: Path, save: bool) -> dict | None:
    """Two steps of Adam with a checkpoint after the first: written on one grid, or read on another."""
    model = fourfold.parallelize(make("qwen3"), Grid(ParallelConfig(**grid), "cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    tokens, labels = make_batch()
    for step in range(2):
        if step == 1:
            model.save(folder, optimizer) if save else model.load(folder, optimizer)
        if step == 1 or save:
            model.backward(model(input_ids=model.rows(tokens), labels=model.rows(labels)).loss)
            model.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
    return model.gather()


def test_a_checkpoint_goes_on_on_another_grid(pool: Pool, tmp_path: Path) -> None:
    folder = tmp_path / "step_1"
    written = pool.run(8, checkpoint_body, GRIDS[0], folder, True)[0]
    for grid in ({"x": 2, "dp": 2}, {"y": 2, "z": 2, "dp": 2}):
        read = pool.run(ParallelConfig(**grid).world_size, checkpoint_body, grid, folder, False)[0]
        assert difference(read, written) < 1e-5


def export_body(rank: int, world_size: int, source: Path, out: Path) -> Tensor:
    """From files to the grid without a whole model anywhere, out again, and text made meanwhile."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(make("qwen3").config)
    model.config.dtype = torch.bfloat16
    model.generation_config.update(do_sample=True, top_k=7)
    parallel = fourfold.parallelize(model, Grid(ParallelConfig(x=2, y=2), "cpu"), weights=source)
    parallel.save_pretrained(out)
    with pytest.raises(UserError, match="exists"):
        parallel.save_pretrained(out)
    with pytest.raises(UserError, match="cannot write"):
        parallel.save_pretrained(source / "config.json" / "out")
    prompt = make_batch()[0][:2, :5]
    return parallel.module.eval().generate(prompt, max_new_tokens=6, do_sample=False)


def test_files_in_and_out_and_generation(pool: Pool, tmp_path: Path) -> None:
    model = make("qwen3")
    model.generation_config.update(do_sample=True, top_k=7)
    model.save_pretrained(tmp_path / "in")
    texts = pool.run(4, export_body, tmp_path / "in", tmp_path / "out")
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert back.config.dtype == torch.float32 and back.config.architectures == ["Qwen3ForCausalLM"]
    assert back.generation_config.top_k == 7
    assert not list(tmp_path.glob("**/.*")), "nothing unfinished is left"
    weights = dict(back.named_parameters())
    assert all(torch.equal(weights[name], parameter) for name, parameter in model.named_parameters())
    expected = model.eval().generate(make_batch()[0][:2, :5], max_new_tokens=6, do_sample=False)
    assert all(torch.equal(text, expected) for text in texts)


class Own(nn.Module):
    """A model of nobody's library."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(64, 32)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(32, 64, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.table(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(32), nn.ModuleDict({"up": nn.Linear(32, 48), "down": nn.Linear(48, 32)})

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp["down"](torch.nn.functional.gelu(self.mlp["up"](self.norm(x))))


OWN_RULES = {"table": "embedding", "*.up": "colwise", "*.down": "rowwise", "head": "colwise_gather_output"}


def own_body(rank: int, world_size: int, rules: dict[str, str]) -> dict[str, Tensor] | None:
    torch.manual_seed(1)
    model = fourfold.parallelize(Own(), Grid(ParallelConfig(x=2, y=2), "cpu"), rules=rules)
    tokens = torch.arange(40).view(4, 10)
    model.backward(model(tokens).float().logsumexp(-1).sum())
    return model.gather(gradients=True)


def test_a_model_of_ones_own_with_a_table_of_patterns(pool: Pool) -> None:
    gradients = pool.run(4, own_body, OWN_RULES)[0]
    torch.manual_seed(1)
    model = Own()
    model(torch.arange(40).view(4, 10)).logsumexp(-1).sum().backward()
    assert difference(gradients, {name: p.grad for name, p in model.named_parameters()}) < 5e-6


def refused(rank: int, world_size: int, grid: dict[str, int], name: str, changes: dict, rules: dict[str, str]) -> str:
    model = Own() if name == "own" else make(name, **changes)
    with pytest.raises(UserError) as raised:
        fourfold.parallelize(model, Grid(ParallelConfig(**grid), "cpu"), rules=rules)
    return str(raised.value)


@pytest.mark.parametrize(
    ("grid", "name", "changes", "rules", "says"),
    [
        ({"x": 2}, "own", {}, {"table": "embedding"}, "publishes no tensor-parallel plan"),
        ({"x": 2}, "own", {}, {k: v for k, v in OWN_RULES.items() if k != "head"}, "head (Linear, weight [64, 32])"),
        ({"x": 2}, "own", {}, OWN_RULES | {"*.up": "diagonal"}, "layers.0.mlp.up: the style 'diagonal'"),
        ({"x": 2}, "own", {}, OWN_RULES | {"*.norm": "colwise"}, "layers.0.norm is a LayerNorm"),
        ({"x": 2}, "llama", {"num_key_value_heads": 1}, {}, "num_key_value_heads = 1 cannot be split over x = 2"),
        ({"x": 2}, "llama", {"vocab_size": 201}, {}, "num_embeddings = 201 cannot be split over x = 2"),
        ({"x": 2}, "llama", {"attention_dropout": 0.1}, {}, "self_attn.attention_dropout = 0.1"),
        ({"cp": 2}, "llama", {}, {}, "cp = 2"),
    ],
)
def test_what_cannot_be_laid_out_is_refused_by_name(
    pool: Pool, grid: dict[str, int], name: str, changes: dict, rules: dict[str, str], says: str
) -> None:
    assert says in pool.run(2, refused, grid, name, changes, rules)[0]


def test_weights_inside_a_sharded_group_need_a_place(pool: Pool) -> None:
    """Their gradients would be shares: the plan of Qwen3 names its head norms, and a Llama's need none."""
    assert pool.run(2, unnamed_norm_body)[0].startswith("model.layers.0.self_attn.q_norm (Qwen3RMSNorm")
    assert "'replicated_with_grad_allreduce' sums it" in pool.run(2, refused, {"x": 2}, "qwen3", {}, HEAD_NORMS)[0]
    # The refusal is of what is wrong: computed so, exactly these gradients are.
    gradients = pool.run(8, wrong_rule_body, HEAD_NORMS)[0]
    wrong = {n for n, g in gradients.items() if (g - reference("qwen3")[2][n]).norm() > 1e-3 * g.norm()}
    assert wrong == {n for n in gradients if "q_norm" in n or "k_norm" in n}, "the comparison sees it"


HEAD_NORMS = {"*.q_norm": "replicate", "*.k_norm": "replicate"}


class Flat(nn.Module):
    """A layer whose norm stands in one module with the linear layers."""

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


def test_a_norm_of_the_residual_may_stand_beside_split_layers(pool: Pool) -> None:
    gradients = pool.run(4, flat_body)[0]
    model = make_flat()
    model(torch.arange(40).view(4, 10)).logsumexp(-1).sum().backward()
    assert difference(gradients, {name: p.grad for name, p in model.named_parameters()}) < 5e-6


def unnamed_norm_body(rank: int, world_size: int) -> str:
    model = make("qwen3")
    model._tp_plan = {key: style for key, style in model._tp_plan.items() if not key.endswith("_norm")}
    model.config.base_model_tp_plan = {}
    with pytest.raises(UserError) as raised:
        fourfold.parallelize(model, Grid(ParallelConfig(x=2), "cpu"))
    return str(raised.value)


def wrong_rule_body(rank: int, world_size: int, rules: dict[str, str]) -> dict[str, Tensor] | None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_plan, "is_of_residual", lambda *_: True)
        model = fourfold.parallelize(make("qwen3"), Grid(ParallelConfig(x=2, y=2, z=2), "cpu"), rules=rules)
    tokens, labels = make_batch()
    model.backward(model(input_ids=model.rows(tokens), labels=model.rows(labels)).loss)
    return model.gather(gradients=True)


def plain_backward_body(rank: int, world_size: int) -> None:
    model = fourfold.parallelize(make("llama"), Grid(ParallelConfig(z=2), "cpu"))
    tokens, labels = (model.rows(each) for each in make_batch())
    with pytest.raises(UserError, match="call backward"):
        model(input_ids=tokens, labels=labels).loss.backward()


def test_a_plain_backward_is_refused(pool: Pool) -> None:
    pool.run(2, plain_backward_body)


def second_backward_body(rank: int, world_size: int, grid: dict[str, int]) -> dict[str, Tensor] | None:
    """The gradients of a backward after steps that were zeroed in both ways, and one that was not."""
    model = fourfold.parallelize(make("llama"), Grid(ParallelConfig(**grid), "cpu"))
    tokens, labels = (model.rows(each) for each in make_batch())
    for set_to_none in (True, False):
        model.backward(model(input_ids=tokens, labels=labels).loss)
        model.zero_grad(set_to_none)
    model.backward(model(input_ids=tokens, labels=labels).loss)
    gradients = model.gather(gradients=True)
    with pytest.raises(UserError, match=r"call backward\(loss, last=False\)"):
        model.backward(model(input_ids=tokens, labels=labels).loss)
    return gradients


@pytest.mark.parametrize("grid", [{"dp": 2}, {"x": 2}, {"z": 2}], ids=str)
def test_gradients_are_not_summed_over_ranks_twice(pool: Pool, grid: dict[str, int]) -> None:
    gradients = pool.run(2, second_backward_body, grid)[0]
    assert difference(gradients, reference("llama")[2]) < 5e-6


def filled_body(rank: int, world_size: int, grid: dict[str, int], folder: Path) -> list[Tensor]:
    """Logits after each way to set the weights, all behind a forward without a backward; and a step's behind one."""
    model = fourfold.parallelize(make("llama"), Grid(ParallelConfig(**grid), "cpu"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens, labels = (model.rows(each) for each in make_batch())
    doubled = {name: 2 * parameter.detach() for name, parameter in make("llama").named_parameters()}
    original = make("llama").state_dict()
    found = []
    with torch.no_grad():
        model(tokens)
        model.save(folder / "checkpoint")
        model.fill(doubled)
        found.append(model(tokens).logits)
        model.load(folder / "checkpoint")
        found.append(model(tokens).logits)
        model.fill_from(folder / "doubled")
        found.append(model(tokens).logits)
    model(tokens)  # gathers for a backward that never comes
    model.fill(original)
    with torch.no_grad():
        found.append(model(tokens).logits)
    model.backward(model(input_ids=tokens, labels=labels).loss)
    with torch.no_grad():
        model.module(tokens)
    optimizer.step()
    with torch.no_grad():
        found.append(model(tokens).logits)
    return found


@pytest.mark.parametrize("grid", [{"z": 2}, {"dp": 2, "zero": 2}], ids=str)
def test_new_weights_count_after_a_forward_alone(pool: Pool, tmp_path: Path, grid: dict[str, int]) -> None:
    model = make("llama")
    doubled = make("llama")
    with torch.no_grad():
        for parameter in doubled.parameters():
            parameter *= 2
    doubled.save_pretrained(tmp_path / "doubled")
    tokens, labels = make_batch()
    ranks = pool.run(2, filled_body, grid, tmp_path)
    found = [torch.cat(logits) for logits in zip(*ranks, strict=True)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.no_grad():
        before, twice = model(tokens).logits, doubled(tokens).logits
    model(input_ids=tokens, labels=labels).loss.backward()
    optimizer.step()
    with torch.no_grad():
        after = model(tokens).logits
    for got, want in zip(found, [twice, before, twice, before, after], strict=True):
        assert (got - want).abs().max() < 1e-4 * want.abs().max()


def refusing_body(rank: int, world_size: int, folder: Path) -> None:
    model = fourfold.parallelize(make("llama"), Grid(ParallelConfig(z=2), "cpu"))
    tokens, labels = (model.rows(each) for each in make_batch())
    (folder / "model").mkdir(exist_ok=True)
    (folder / "model" / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match="is no checkpoint of a parallelized model"):
        model.save(folder / "model")
    with pytest.raises(UserError, match="cannot write"):
        model.save(folder / "model" / "thesis.txt" / "step_1")
    for _ in range(2):
        model.save(folder / "step_1")
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(UserError, match="was saved without an optimizer"):
        model.load(folder / "step_1", optimizer)
    out = model(input_ids=tokens, labels=torch.full_like(labels, -100))
    assert out.loss.item() == 0, "no token is kept"
    model.backward(out.loss)
    for parameter in model.parameters():
        optimizer.state[parameter] = {"row": torch.ones(3)}
    with pytest.raises(UserError, match="AdamW keeps row of"):
        model.save(folder / "step_2", optimizer)
    with pytest.raises(UserError, match="fp32 or bf16"):
        fourfold.parallelize(make("llama"), model.grid, precision="fp16")


def test_what_would_be_lost_or_wrong_is_refused_on_every_process(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, refusing_body, tmp_path)
    assert (tmp_path / "model" / "thesis.txt").read_text() == "years of work"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "step_1"]


class Spare(Own):
    """It has a weight that no forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.LayerNorm(32)


def spare_body(rank: int, world_size: int) -> None:
    model = fourfold.parallelize(Spare(), Grid(ParallelConfig(dp=2), "cpu"), rules=OWN_RULES)
    model.backward(model(torch.arange(40).view(4, 10)).logsumexp(-1).sum())
    assert {n for n, p in model.module.named_parameters() if p.grad is None} == {"spare.weight", "spare.bias"}


def test_a_weight_without_a_gradient_stays_without(pool: Pool) -> None:
    pool.run(2, spare_body)
