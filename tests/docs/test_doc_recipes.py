"""Every run file of examples/ has a plan, fits, and is in the table of docs/recipes.md with its prediction."""

from __future__ import annotations

import json
import re
import sys

import pytest
from markdown import REPOSITORY

from fourfold.planning.calibration.machine_constants import constants_for, shipped_order_factor
from fourfold.planning.machines.machine import load_machine
from fourfold.planning.run_workload import workload_of
from fourfold.planning.search.fastest import MAX_P_OUT_OF_MEMORY
from fourfold.planning.search.plan import describe_layout, make_plan
from fourfold.planning.search.space import LIMITED
from fourfold.run_file.load import load_run

sys.path.append(str(REPOSITORY / "docs"))

import recipes

RECIPES = pytest.mark.parametrize("recipe", recipes.RECIPES, ids=lambda recipe: recipe.name)
MEMORIZATION = {f"memorization/{name}.toml" for name in ("arm", "buckets", "tutorial")}
OTHERS = {"demo.toml", "parity.toml", "loki/model.toml", *MEMORIZATION}
"""Run files of the tutorials."""
TRACED = ("finetuning/llama-3.1-8b-lora.toml", "finetuning/llama-3.1-70b-lora.toml")


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in the repository, because run files name the folders of models relative to it."""
    monkeypatch.chdir(REPOSITORY)


def test_no_run_file_is_left_out() -> None:
    found = {path.relative_to(recipes.EXAMPLES).as_posix() for path in recipes.EXAMPLES.rglob("*.toml")}
    assert found == {recipe.path for recipe in recipes.RECIPES} | OTHERS


def test_the_page_is_what_its_script_writes() -> None:
    assert recipes.PAGE.read_text(encoding="utf-8") == recipes.page(), "run: python docs/recipes.py"


@RECIPES
def test_a_recipe_is_as_declared_and_fits(recipe: recipes.Recipe) -> None:
    run = load_run(recipe.file)
    if recipe.gpus:
        assert run.parallel.world_size == recipe.gpus
        record = recipes.prediction(recipe).record()
        text = recipes.run_file(
            recipe, record["parallel"], record["micro_batch_size"], recipes.MODES.index(run.activation_checkpoint.mode)
        )
        assert recipe.file.read_text(encoding="utf-8") == text, "run: python docs/recipes.py --plan"
    if recipe.layout:
        assert describe_layout(workload_of(run).but(**dict(recipe.layout))) == describe_layout(workload_of(run))
    if not run.lora.rank:
        # The layout of a paper only has to fit with a probability of one half. The page shows the probability.
        assert recipes.prediction(recipe).p_oom <= (0.5 if recipe.layout else MAX_P_OUT_OF_MEMORY)


def test_layouts_of_the_papers_are_slower_than_ours() -> None:
    for size in ("22b", "175b", "1t"):
        published, ours = (
            recipes.prediction(next(r for r in recipes.RECIPES if r.path == f"frontier/{size}{suffix}.toml"))
            for suffix in ("-published", "")
        )
        assert ours.seconds < published.seconds


@pytest.mark.parametrize("recipe", [r for r in recipes.RECIPES if not r.gpus], ids=lambda recipe: recipe.name)
def test_a_layout_by_hand_is_about_as_fast_as_the_best_or_says_how_much_slower(recipe: recipes.Recipe) -> None:
    run, machine = load_run(recipe.file), load_machine(recipe.machine)
    if run.lora.rank:
        pytest.skip("the planner does not predict LoRA")
    own, work = recipes.prediction(recipe), workload_of(run)
    gpus = run.parallel.world_size
    same = [r for r in recipes.RECIPES if (r.gpus, r.machine) == (gpus, recipe.machine) and not r.layout
            and workload_of(load_run(r.file)).model == work.model]  # fmt: skip
    # The best layout for this model and these GPUs is in another recipe.
    if same:
        best = recipes.prediction(same[0]).tokens_per_second
    else:
        alone = work.but(**dict.fromkeys(LIMITED, 1))
        best = make_plan(alone, machine, constants_for(machine), gpus, 1, recipes.SEARCHED).best.tokens_per_second
    said = re.search(r"is ([0-9.]+) times as fast", recipe.file.read_text(encoding="utf-8"))
    if said is None:
        assert best < shipped_order_factor() * own.tokens_per_second
    else:
        assert float(said[1]) == pytest.approx(best / own.tokens_per_second, rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("path", TRACED)
def test_the_memory_of_lora_is_what_the_trace_counts(path: str) -> None:
    recipe = next(recipe for recipe in recipes.RECIPES if recipe.path == path)
    stored = json.loads(recipes.TRACED.read_text(encoding="utf-8"))[path]
    assert recipes.traced(recipe) == stored


@pytest.mark.slow
@pytest.mark.parametrize("path", ["pretraining/gpt2-xl-1gpu.toml", "axonn/alps/gpt-10b.toml"])
def test_the_planned_memory_is_what_the_trace_counts(path: str) -> None:
    """The planner also counts its reserve. If memory peaks at the start of the only backward, there are no gradients
    yet."""
    recipe = next(recipe for recipe in recipes.RECIPES if recipe.path == path)
    memory, stage = recipes.traced(recipe), recipes.prediction(recipe).stages[0]
    for states in ("parameters", "optimizer"):
        assert memory[states] == pytest.approx(stage[states], rel=0.025)
    assert stage["gradients"] in (0, pytest.approx(memory["gradients"], rel=0.025))
    assert memory["total_peak"] == pytest.approx(sum(stage.values()) - stage["reserve"], rel=0.1)
