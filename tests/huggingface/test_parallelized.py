"""A transformers model on the grid, in the user's own training loop, computes the same as before."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from parallelized_models import difference, make, make_batch, reference
from pool import Pool
from safetensors.torch import load_file, save_file
from torch import Tensor

import fourfold
from fourfold.config.run import ParallelConfig
from fourfold.errors import UserError
from fourfold.parallel.grid.grid import Grid
from fourfold.parallel.other_models.plan_styles import saved_buffers

transformers = pytest.importorskip("transformers")

GRIDS = [{"x": 2, "y": 2, "z": 2}, {"x": 4, "dp": 2}, {"y": 2, "z": 2, "dp": 2, "zero": 3}, {"x": 2, "y": 4}]


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


FAST = {("qwen3", 0), ("mistral", 2), ("gpt_neox", 3), ("qwen3_moe", 0), ("mixtral", 3), ("gpt2", 0)}
"""One grid for each of these families."""


@pytest.mark.parametrize(
    ("name", "grid"),
    [
        pytest.param(name, grid, id=f"{name}-{grid}", marks=[] if (name, number) in FAST else [pytest.mark.slow])
        for name in ("llama", "qwen3", "mistral", "gpt_neox", "gpt2", "mixtral", "qwen3_moe")
        for number, grid in enumerate(GRIDS)
    ],
)
def test_loss_and_gradients_equal_the_original_model(pool: Pool, name: str, grid: dict[str, int]) -> None:
    check(pool, name, grid)


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(
    ("name", "grid"),
    [
        ("phi3", {"x": 2, "y": 2}),
        pytest.param("phi3", GRIDS[0], marks=pytest.mark.slow),
        ("gemma", {"x": 2, "y": 2}),
        pytest.param("gemma", GRIDS[0], marks=pytest.mark.slow),
        ("olmo2", {"x": 2, "y": 2}),
        pytest.param("olmo2", GRIDS[3], marks=pytest.mark.slow),
        ("olmoe", {"x": 2, "y": 2}),
        pytest.param("olmoe", GRIDS[2], marks=pytest.mark.slow),
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
    """Take two steps of Adam. After the first step, write a checkpoint on one grid, or read it on another."""
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


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"y": 2, "z": 2}, {"x": 2, "dp": 2}),
        pytest.param(GRIDS[0], {"x": 2, "dp": 2}, marks=pytest.mark.slow),
        pytest.param(GRIDS[0], {"y": 2, "z": 2, "dp": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_checkpoint_resumes_on_another_grid(
    pool: Pool, tmp_path: Path, first: dict[str, int], second: dict[str, int]
) -> None:
    written, read = (
        pool.run(ParallelConfig(**grid).world_size, checkpoint_body, grid, tmp_path / "step_1", grid is first)[0]
        for grid in (first, second)
    )
    assert difference(read, written) < 1e-5


def buffers_body(rank: int, world_size: int, grid: dict[str, int], folder: Path, save: bool) -> dict[str, Tensor]:
    """Change the saved buffers and write a checkpoint on one grid, or read it on another."""
    model = fourfold.parallelize(make("glm4_moe"), Grid(ParallelConfig(**grid), "cpu"))
    if save:
        for buffer in saved_buffers(model.module).values():
            buffer += torch.arange(len(buffer))
        model.save(folder)
    else:
        model.load(folder)
    return {name: buffer.clone() for name, buffer in saved_buffers(model.module).items()}


def test_saved_buffers_are_in_a_checkpoint(pool: Pool, tmp_path: Path) -> None:
    first = {name: buffer + torch.arange(len(buffer)) for name, buffer in saved_buffers(make("glm4_moe")).items()}
    assert list(first) == ["model.layers.1.mlp.gate.e_score_correction_bias"]
    for grid, save in (({"y": 2, "z": 2}, True), ({"x": 2, "dp": 2}, False)):
        for found in pool.run(4, buffers_body, grid, tmp_path / "step_1", save):
            assert found.keys() == first.keys()
            assert all(torch.equal(found[name], first[name]) for name in first)


def export_body(rank: int, world_size: int, name: str, source: Path, out: Path) -> Tensor:
    """Load a model from files onto the grid, and write it again. No process ever has the whole model. In between,
    generate text."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(make(name).config)
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


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(
    "name",
    (
        "qwen3",
        "gpt2",
        "mixtral",
        "qwen3_moe",
        "gpt_neox",
        "gemma",
        "gemma2",
        "gemma3",
        "flex_olmo",
        "mellum",
        "glm4_moe",
        "gpt_oss",
        "deepseek_v3",
        "apertus",
    ),
)
def test_files_in_and_out_and_generation(pool: Pool, name: str, tmp_path: Path) -> None:
    model = make(name)
    model.generation_config.update(do_sample=True, top_k=7)
    model.save_pretrained(tmp_path / "in")
    texts = pool.run(4, export_body, name, tmp_path / "in", tmp_path / "out")
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert back.config.dtype == torch.float32 and back.config.architectures == [type(model).__name__]
    assert back.generation_config.top_k == 7
    names = [{n for file in (tmp_path / each).glob("*.safetensors") for n in load_file(file)} for each in ("in", "out")]
    assert names[0] == names[1]
    assert not list(tmp_path.glob("**/.*")), "nothing unfinished is left"
    weights = back.state_dict()
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())
    expected = model.eval().generate(make_batch()[0][:2, :5], max_new_tokens=6, do_sample=False)
    assert all(torch.equal(text, expected) for text in texts)


def from_meta_body(rank: int, world_size: int, name: str, folder: Path) -> Tensor:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(make(name).config)
    parallel = fourfold.parallelize(model, Grid(ParallelConfig(x=2), "cpu"), weights=folder)
    with torch.no_grad():
        return parallel(make_batch()[0]).logits


def test_a_stored_head_that_differs_from_the_tied_embedding_is_refused(pool: Pool, tmp_path: Path) -> None:
    model = make("gemma2")
    model.save_pretrained(tmp_path / "in")
    with torch.no_grad():
        expected = model(make_batch()[0]).logits
    for logits in pool.run(2, from_meta_body, "gemma2", tmp_path / "in"):
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    file = tmp_path / "in" / "model.safetensors"
    tensors = load_file(file)
    head = tensors["model.embed_tokens.weight"].clone()
    head[-1] += 1
    save_file(tensors | {"lm_head.weight": head}, file)
    with pytest.raises(Exception, match="differs from model"):
        pool.run(2, from_meta_body, "gemma2", tmp_path / "in")


def router_loss_body(rank: int, world_size: int) -> None:
    model = fourfold.parallelize(make("mixtral"), Grid(ParallelConfig(z=2), "cpu"))
    tokens, labels = (model.rows(each) for each in make_batch())
    with pytest.raises(UserError, match="output_router_logits = True adds a loss"):
        model(input_ids=tokens, labels=labels, output_router_logits=True)
    model.module.config.output_router_logits = True
    with pytest.raises(UserError, match="output_router_logits = True adds a loss"):
        model(input_ids=tokens, labels=labels)
    assert model(input_ids=tokens, labels=labels, output_router_logits=False).loss > 0


def test_a_router_loss_is_refused_if_processes_share_the_batch(pool: Pool) -> None:
    pool.run(2, router_loss_body)


def plain_backward_body(rank: int, world_size: int) -> None:
    model = fourfold.parallelize(make("llama"), Grid(ParallelConfig(z=2), "cpu"))
    tokens, labels = (model.rows(each) for each in make_batch())
    with pytest.raises(UserError, match="call backward"):
        model(input_ids=tokens, labels=labels).loss.backward()


def test_a_plain_backward_is_refused(pool: Pool) -> None:
    pool.run(2, plain_backward_body)


def second_backward_body(rank: int, world_size: int, grid: dict[str, int]) -> dict[str, Tensor] | None:
    """Take three steps. Zero the gradients of the first two steps in the two possible ways, and return the gradients of
    the third step. Then check that another backward without zeroing is refused."""
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
    """Set the weights in every possible way, each time after a forward without a backward and after a step. Return the
    logits each time."""
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
    model(tokens)  # this gathers weights, and no backward pass frees them
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
    with pytest.raises(UserError, match="is not a checkpoint of a parallelized model"):
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


def low_precision_body(rank: int, world_size: int, grid: dict[str, int]) -> list[float] | None:
    """Take two steps with one micro-batch, and two steps with one micro-batch per sequence, all with the same weights.
    Return the relative errors of a bf16 model's gradients."""
    model = fourfold.parallelize(make("llama").bfloat16(), Grid(ParallelConfig(**grid), "cpu"))
    exact = make("llama").bfloat16().float()
    tokens = torch.randint(4, 200, (128, 8), generator=torch.Generator().manual_seed(6))
    exact(input_ids=tokens, labels=tokens).loss.backward()
    right = {name: parameter.grad for name, parameter in exact.named_parameters()}
    optimizer, kept, errors = torch.optim.AdamW(model.parameters(), lr=0.0), model.count(model.rows(tokens)), []
    for micro_batches, set_to_none in ((1, True), (1, False), (64, True), (64, True)):
        for part, batch in enumerate(tokens.chunk(micro_batches)):
            mine = model.rows(batch)
            loss = model(input_ids=mine, labels=mine, num_items_in_batch=kept).loss
            model.backward(loss, last=part == micro_batches - 1)
        assert all(parameter.grad.dtype == torch.bfloat16 for parameter in model.parameters())
        found = model.gather(gradients=True)
        if found is not None:
            ratios = [(found[name] - right[name]).norm() / right[name].norm() for name in right]
            errors.append(torch.stack(ratios).median().item())
        optimizer.step()
        optimizer.zero_grad(set_to_none)
    return errors


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("grid", [{"dp": 2}, {"z": 2}, {"dp": 2, "zero": 3}], ids=str)
def test_small_micro_batches_of_a_bf16_model_are_as_accurate_as_a_large_one(pool: Pool, grid: dict[str, int]) -> None:
    large, again, small, small_again = pool.run(2, low_precision_body, grid)[0]
    assert large == again and small == small_again
    assert 0 < small < 1.02 * large
