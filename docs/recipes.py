"""Write docs/recipes.md, which has the planner's prediction for every run file in examples/. The planner does not
support LoRA. So for run files with LoRA, the page has only the memory that ``fourfold trace`` counts.

python docs/recipes.py           the page
python docs/recipes.py --plan    plan the layouts of the generated run files again, then write the page
python docs/recipes.py --trace   count the memory of LoRA again, then the page
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from validation_page.published_table import published_table

from fourfold.parsing import parse_toml
from fourfold.planning.calibration.machine_constants import constants_for
from fourfold.planning.machines.machine import load_machine
from fourfold.planning.run_workload import workload_of
from fourfold.planning.search.fastest import MAX_P_OUT_OF_MEMORY
from fourfold.planning.search.plan import Prediction, describe_layout, make_plan, predict
from fourfold.planning.search.space import LIMITED, SearchLimits
from fourfold.run_file.load import load_run, make_run

HERE = Path(__file__).parent
EXAMPLES = HERE.parent / "examples"
PAGE, TEMPLATE, TRACED = HERE / "recipes.md", HERE / "recipes_page.md.in", HERE / "figures" / "recipes_traced.json"
SEARCHED = SearchLimits(
    fixed=(("cp", 1),),
    zeros=(0, 1, 2, 3),
    recomputes=((0, 1, False), (1, 1, False), (2, 1, False)),
    pipelines=(("1F1B", 1), ("Interleaved1F1B", 2), ("Interleaved1F1B", 4)),
    batch_parts=(1,),
)
"""Limits of the search for layouts. The search tries only common values, so that it takes about a second."""


@dataclass(frozen=True)
class Recipe:
    """A run file in examples/. ``gpus`` is the number of GPUs for which the planner chose the layout. It is 0 if we
    chose the layout by hand."""

    path: str
    machine: str
    title: str = ""
    model: str = ""
    gpus: int = 0
    batch: int = 0
    seq: int = 2048
    published: str = ""
    layout: tuple[tuple[str, Any], ...] = ()
    """Values of the layout that we set ourselves, instead of searching for the fastest layout."""
    tuned: bool = False
    """Whether the run fine-tunes a model's weights on conversations."""
    schedule: tuple[str, int] = ("1e-4", 1000)
    """The learning rate, and the number of warm-up steps."""

    @property
    def file(self) -> Path:
        return EXAMPLES / self.path

    @property
    def name(self) -> str:
        return self.path.removesuffix(".toml").replace("/", "-")


DEFAULTS = {"zero": 0, "schedule": "1F1B"}
"""Defaults of the keys in [parallel], if the default is not 1."""
HEADER = ("run file", "machine", "GPUs", "layout", "GB", "of GB", "s/step", "MFU", "Megatron PFLOP/s",
          "published")  # fmt: skip
MODES = ("none", "selective", "full")
AXONN_GPUS = {
    "perlmutter": (512, 1024, 2048, 4096, 4096, 4096, 4096, 4096, 4096),
    "frontier": (512, 1024, 2048, 4096, 8192, 8192, 16384, 32768, 32768),
    "alps": (512, 1024, 2048, 4096, 6144, 6144, 6144, 6144, 6144),
}
AXONN_SIZES = ("5b", "10b", "20b", "40b", "60b", "80b", "160b", "320b", "640b")


def of_axonn() -> list[Recipe]:
    figures = {(row["machine"], row["model"]): row["pflops"] for row in published_table()["figure"]}
    recipes = []
    for machine, sizes in AXONN_GPUS.items():
        for size, gpus in zip(AXONN_SIZES, sizes, strict=True):
            model = f"gpt-{size}"
            pflops = figures.get((machine, model))
            title = f"The {size.upper()} model of the AxoNN paper (arXiv 2502.08145) on {gpus:,} GPUs of"
            recipes.append(
                Recipe(
                    f"axonn/{machine}/{model}.toml",
                    machine,
                    f"{title} {machine.capitalize()}",
                    model,
                    gpus,
                    # The number of sequences per step. On 6,144 GPUs, it must be a multiple of 3.
                    9216 if gpus % 3 == 0 else 8192,
                    published=f"{pflops:,}" if pflops else "",
                )
            )
    return recipes


def of_frontier_study() -> list[Recipe]:
    recipes = []
    for row in published_table()["figure"]:
        if "layout" in row:
            size = row["model"].removeprefix("frontier-")
            title = f"The {size.upper()} model of the Frontier study (arXiv 2312.12705) on {row['gpus']:,} GCDs"
            common = (row["machine"], title, row["model"], row["gpus"], row["batch"], row["seq"])
            published = f"{row['pflops']:,}"
            layout = tuple(row["layout"].items())
            recipes += [
                Recipe(
                    f"frontier/{size}-published.toml",
                    common[0],
                    f"{title}, in the study's layout",
                    *common[2:],
                    published,
                    layout,
                ),
                Recipe(f"frontier/{size}.toml", *common),
            ]
    return recipes


def of_tuning(size: str, gpus: int, batch: int) -> Recipe:
    title, model = f"Full fine-tuning of Llama 3.1 {size.upper()} on {gpus} H100", f"llama-3.1-{size}"
    return Recipe(f"finetuning/{model}.toml", "dgx-h100", title, model, gpus, batch, 8192, tuned=True)


def of_mlperf(model: str, title: str, gpus: int, batch: int, seq: int, schedule: tuple[str, int]) -> Recipe:
    """Return a run with the batch, the sequence length, and the learning rate of MLPerf Training v6.0."""
    title = f"{title} on {gpus:,} H100, with the batch and the learning rate of MLPerf Training v6.0"
    return Recipe(f"mlperf/{model}.toml", "dgx-h100", title, model, gpus, batch, seq, schedule=schedule)


RECIPES = (
    Recipe("laptop.toml", "laptop"),
    Recipe("pretraining/gpt2-xl-1gpu.toml", "dgx-h100", "GPT-2 XL on one H100", "gpt2-xl", 1, 512, 1024),
    Recipe("llama3-8b-8gpus.toml", "dgx-h100"),
    Recipe("pretraining/llama3-70b-64gpus.toml", "dgx-h100", "Llama 3 70B on 64 H100", "llama3-70b", 64, 512, 8192),
    Recipe("llama3-70b-512gpus.toml", "dgx-h100"),
    of_mlperf("gpt-oss-20b", "GPT-OSS 20B", 8, 16, 8192, ("4e-4", 128)),
    of_mlperf("deepseek-v3", "DeepSeek-V3", 2048, 15360, 4096, ("2.3e-5", 4)),
    *of_axonn(),
    Recipe("gpt-320b-32768gpus.toml", "frontier"),
    *of_frontier_study(),
    Recipe("frontier-1t-3072gpus.toml", "frontier"),
    of_tuning("8b", 8, 64),
    Recipe("finetuning/llama-3.1-8b-lora.toml", "dgx-h100"),
    of_tuning("70b", 32, 128),
    Recipe("finetuning/llama-3.1-70b-lora.toml", "dgx-h100"),
    Recipe("llama-3.1-405b.toml", "dgx-h100"),
    Recipe("finetuning/llama-3.1-405b-lora.toml", "dgx-h100"),
)  # fmt: skip


def main() -> None:
    # The run files name the folders of models relative to this folder.
    os.chdir(EXAMPLES.parent)
    if sys.argv[1:] == ["--plan"]:
        for recipe in RECIPES:
            if recipe.gpus:
                recipe.file.parent.mkdir(parents=True, exist_ok=True)
                recipe.file.write_text(planned(recipe), encoding="utf-8")
    if sys.argv[1:] == ["--trace"]:
        found = {recipe.path: traced(recipe) for recipe in RECIPES if load_run(recipe.file).lora.rank}
        TRACED.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(), encoding="utf-8")


def planned(recipe: Recipe) -> str:
    """Return the text of a recipe's run file. If the recipe has no layout, search for the fastest one."""
    machine = load_machine(recipe.machine)
    text = run_file(recipe, {}, 1, 0)
    work = workload_of(make_run(parse_toml(text)))
    if recipe.layout:
        best = predict(work.but(**dict(recipe.layout)), machine, constants_for(machine))
    else:
        base = work.but(**dict.fromkeys(LIMITED, 1))
        best = make_plan(base, machine, constants_for(machine), recipe.gpus, 1, SEARCHED).best
    record = best.record()
    return run_file(recipe, record["parallel"], record["micro_batch_size"], int(best.work.layout.recompute))


def run_file(recipe: Recipe, parallel: dict[str, Any], micro_batch: int, recompute: int) -> str:
    grid = [f"{key} = {json.dumps(value)}" for key, value in parallel.items() if value != DEFAULTS.get(key, 1)]
    model = f'from_hf = "examples/{recipe.model}"' if recipe.tuned else f'preset = "{recipe.model}"'
    corpus = (
        'format = "sft"\ntrain = [{ path = "corpora/talks" }]' if recipe.tuned else 'train = [{ path = "corpora/web" }]'
    )
    rate, warmup = ("1e-5", 30) if recipe.tuned else recipe.schedule
    sections = [
        f"# {recipe.title}.\n# docs/recipes.md shows the memory and the step time that the planner predicts.",
        f'name = "{recipe.name}"',
        f"\n[model]\n{model}",
        f"\n[data]\n{corpus}",
        "\n".join(["\n[parallel]", *grid]) if grid else "",
        f"\n[training]\nmicro_batch_size = {micro_batch}\nglobal_batch_size = {recipe.batch}",
        f'seq_length = {recipe.seq}\ntrain_steps = {1000 if recipe.tuned else 10000}\nprecision = "bf16"',
        f'\n[activation_checkpoint]\nmode = "{MODES[recompute]}"' if recompute else "",
        f"\n[optimizer]\nlr = {rate}\n\n[lr_scheduler]\nwarmup_steps = {warmup}",
    ]  # fmt: skip
    return "\n".join(section for section in sections if section) + "\n"


def prediction(recipe: Recipe) -> Prediction:
    machine = load_machine(recipe.machine)
    return predict(workload_of(load_run(recipe.file)), machine, constants_for(machine))


def traced(recipe: Recipe) -> dict[str, float]:
    """Return the memory of rank 0 in bytes, as ``fourfold trace`` counts it. The keys are kinds of memory."""
    from fourfold.verification.trace import trace

    return trace(load_run(recipe.file)).record()["memory"]


def row(recipe: Recipe) -> tuple[str, ...]:
    """Return a recipe's row in the table of the page."""
    run, machine = load_run(recipe.file), load_machine(recipe.machine)
    link = f"[{recipe.path.removesuffix('.toml')}](../examples/{recipe.path})"
    gpus, of = f"{run.parallel.world_size:,}", f"{machine.memory / 1e9:.0f}"
    if run.lora.rank:
        memory = json.loads(TRACED.read_text(encoding="utf-8"))[recipe.path]["total_peak"]
        layout = f"{run.parallel.describe()}, LoRA, {run.activation_checkpoint.mode} recompute"
        return link, machine.name, gpus, layout, f"{memory / 1e9:.1f} (traced)", of, *[""] * (len(HEADER) - 6)
    found = prediction(recipe)
    work = found.work
    risk = f" (runs out of memory with a probability of {found.p_oom:.0%})" if found.p_oom > MAX_P_OUT_OF_MEMORY else ""
    return (
        link,
        machine.name,
        gpus,
        describe_layout(work),
        f"{found.memory_bytes / 1e9:.1f}{risk}",
        of,
        f"{found.seconds:.3g}",
        f"{found.utilization(work.model_flops()):.1%}",
        f"{found.pflops(work.megatron_flops()):,.1f}" if recipe.published else "",
        recipe.published,
    )


def page() -> str:
    rows = [row(recipe) for recipe in RECIPES]
    table = [f"| {' | '.join(cells)} |" for cells in (HEADER, ["---"] * len(HEADER), *rows)]
    return TEMPLATE.read_text(encoding="utf-8").replace("@recipes@", "\n".join(table))


if __name__ == "__main__":
    main()
