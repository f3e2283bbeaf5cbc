"""Run the experiments of the goldfish paper at laptop scale: train models in several ways (arms), and audit them.

    python examples/memorization/protocol.py [--seeds 3] [--out runs/memorization] [--arms standard,hash4]

A small corpus contains 300 copies of each planted document (canary), and no copy of the control documents. A Llama with
about 1 million parameters reads the corpus once, or a quarter of it several times, with and without goldfish masks
(Hans et al. 2024, arXiv 2406.10209). Planting documents a known number of times follows Singh et al. 2024, arXiv
2502.08145. An arm of the tutorial takes half a minute per seed on one core, and any other arm takes about two minutes.
If you run the script again, it does not repeat finished arms. It writes OUT/results.json and OUT/results.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from text import write_text

from fourfold.data.canaries import Canaries, ledger_path
from fourfold.data.order import falls_within
from fourfold.data.prepare import prepare
from fourfold.launch.job_processes import run_on_grid
from fourfold.memorization.audit_request import AuditRequest
from fourfold.memorization.goldfish_laws import exact_match_law
from fourfold.memorization.intervals import wilson
from fourfold.memorization.scored_model import find_model
from fourfold.reports.audit_report import write_audit_report
from fourfold.run_file.load import load_run
from fourfold.training.metrics import read_metrics

HERE = Path(__file__).parent
LENGTH, SUFFIX = 96, 50
"""Number of tokens in a canary, and number of tokens in its suffix. In an exact match, the model repeats the full
suffix."""
CHARACTERS = 1_400_000  # With the canaries, this is one epoch of arm.toml.
TUTORIAL_CHARACTERS = 150_000  # With the canaries, this is one epoch of tutorial.toml.
HELD_BACK = 0.05
CORPORA = {
    "exact": Canaries(16, (0, 300), LENGTH),
    "noisy": Canaries(16, (0, 300), LENGTH, noise=0.05),
    "quarter": Canaries(16, (0, 75), LENGTH),
    "tutorial": Canaries(16, (0, 200)),
}
"""The canaries in each corpus. The corpus "quarter" has a quarter of the text, and a run reads it three or four
times."""


@dataclass(frozen=True)
class Arm:
    """A way to train. ``corpus`` names one of ``CORPORA``. Arms of the tutorial use tutorial.toml, and all other arms
    use arm.toml."""

    name: str
    title: str
    overrides: tuple[str, ...] = ()
    corpus: str = "exact"
    k: int | None = None

    @property
    def run_file(self) -> Path:
        return HERE / ("tutorial.toml" if self.corpus == "tutorial" else "arm.toml")


def goldfish(strategy: str, k: int = 4, h: int = 13) -> tuple[str, ...]:
    return tuple(f"masks.goldfish.{key}={value}" for key, value in (("strategy", strategy), ("k", k), ("h", h)))


THREE_QUARTERS_OF_THE_STEPS = ("training.train_steps=420", "validation.interval=105")
THREE_QUARTERS_OF_THE_BATCH = ("training.global_batch_size=6", "training.micro_batch_size=6")

ARMS = (
    Arm("standard", "standard"),
    Arm("hash4", "goldfish, hash, k 4, h 13", goldfish("hash"), k=4),
    Arm("random4", "random mask, k 4 (the control)", goldfish("random")),
    Arm("static4", "static mask, k 4, copies at any place", goldfish("static")),
    Arm("hash32", "goldfish, hash, k 32, h 13", goldfish("hash", k=32), k=32),
    Arm("standard75", "standard, 3/4 of the steps", THREE_QUARTERS_OF_THE_STEPS),
    Arm("standard6", "standard, 3/4 of the batch", THREE_QUARTERS_OF_THE_BATCH),
    Arm("passes4", "four passes: goldfish, hash, k 4, h 13", goldfish("hash"), "quarter", 4),
    Arm("passes3", "three passes: standard, 3/4 of the steps", THREE_QUARTERS_OF_THE_STEPS, "quarter"),
    Arm("passes3batch", "three passes: standard, 3/4 of the batch", THREE_QUARTERS_OF_THE_BATCH, "quarter"),
    Arm("noisy13", "hash, k 4, h 13, copies differ in 5 %", goldfish("hash"), "noisy", 4),
    Arm("noisy4", "hash, k 4, h 4, copies differ in 5 %", goldfish("hash", h=4), "noisy", 4),
    Arm("tutorial", "the tutorial: standard", corpus="tutorial"),
    Arm("tutorial4", "the tutorial: goldfish, hash, k 4, h 13", goldfish("hash"), "tutorial", 4),
    Arm("tutorial50", "the tutorial: goldfish, hash, k 50, h 50", goldfish("hash", k=50, h=50), "tutorial", 50),
)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--out", type=Path, default=Path("runs/memorization"))
    options.add_argument("--arms", default=",".join(arm.name for arm in ARMS))
    options.add_argument("--steps", type=int, help="Number of training steps. Use a small number to try the script.")
    given = options.parse_args()
    if unknown := set(given.arms.split(",")) - {arm.name for arm in ARMS}:
        options.error(f"no arm {', '.join(sorted(unknown))}; there are {', '.join(arm.name for arm in ARMS)}")
    make_corpora(given.out)
    for seed in range(given.seeds):
        for arm in ARMS:
            if arm.name in given.arms.split(","):
                train_and_audit(arm, seed, given.out, given.steps)
                write_results(given.out)
    print((given.out / "results.md").read_text(encoding="utf-8"))


def make_corpora(out: Path) -> None:
    """Prepare all corpora, and hold out some of their documents for validation. The tutorial's corpus has its own
    tokenizer, and all other corpora share a tokenizer."""
    folder = out / "corpora"
    text, quarter = folder / "text.jsonl", folder / "quarter.jsonl"
    if not text.is_file():
        write_text(text, CHARACTERS)
    tokenizer = folder / "exact-tokenizer.json"
    prepare([text], folder / "exact", train_tokenizer_vocab=2048, validation_fraction=HELD_BACK,
            canaries=CORPORA["exact"])  # fmt: skip
    prepare([text], folder / "noisy", tokenizer=tokenizer, validation_fraction=HELD_BACK, canaries=CORPORA["noisy"])
    if not quarter.is_file():
        lines = text.read_text(encoding="utf-8").splitlines(keepends=True)
        # ``prepare`` holds out the same documents, because it uses this seed.
        held_back = falls_within(np.arange(len(lines)), HELD_BACK, seed=0)
        kept = [line for line, held in zip(lines, held_back, strict=True) if not held]
        quarter.write_text("".join(kept[::4]), encoding="utf-8")
    prepare([quarter], folder / "quarter", tokenizer=tokenizer, canaries=CORPORA["quarter"])
    docstrings = folder / "docstrings.jsonl"
    if not docstrings.is_file():
        write_text(docstrings, TUTORIAL_CHARACTERS)
    prepare([docstrings], folder / "tutorial", train_tokenizer_vocab=1024, validation_fraction=0.15,
            canaries=CORPORA["tutorial"])  # fmt: skip


def train(arm: Arm, seed: int, out: Path, steps: int | None) -> Path:
    """Train one model, and return its folder."""
    folder = out / f"{arm.name}-{seed}"
    corpus = out / "corpora" / arm.corpus
    held_back = out / "corpora" / ("tutorial-validation" if arm.corpus == "tutorial" else "exact-validation")
    overrides = [
        f"name={folder.name}",
        f"output_dir={out}",
        f"data.train=[{{path='{corpus}'}}]",
        f"data.validation=[{{path='{held_back}'}}]",
        f"training.seed={seed}",
        f"masks.goldfish.seed={seed}",
        *arm.overrides,
        *([] if steps is None else [f"training.train_steps={steps}", f"validation.interval={steps}"]),
    ]
    outcome = run_on_grid("fourfold.training.trainer:train", [load_run(arm.run_file, overrides)], 1)
    if outcome.stopped:
        # A signal stopped the run. If you start the script again, the run continues from its checkpoint.
        raise SystemExit(3)
    return folder


def audit(arm: Arm, folder: Path, out: Path, **options: Any) -> None:
    """Audit a trained model on the passages of its corpus.

    For each document, the model gets all text before the suffix. This includes the control documents, which were
    planted 0 times.
    """
    ledger, prefix = ledger_path(out / "corpora" / arm.corpus), CORPORA[arm.corpus].length - SUFFIX
    request = AuditRequest(model=str(folder), documents=ledger, suffix=SUFFIX, prefix=prefix, **options)
    record = run_on_grid("fourfold.memorization.audit:run_audit", [request, find_model(request.model, request)], 1)
    write_audit_report(record, folder)


def train_and_audit(arm: Arm, seed: int, out: Path, steps: int | None, **options: Any) -> None:
    """Train one model and audit it, unless an earlier call has already done this. ``options`` are options of the
    audit."""
    if not (out / f"{arm.name}-{seed}" / "audit.json").is_file():
        audit(arm, train(arm, seed, out, steps), out, **options)


def write_results(out: Path) -> None:
    """Write the results as JSON and as a Markdown table. An arm's row has rates over all seeds together, and the mean
    and the range of the losses."""
    results = {arm.name: row for arm in ARMS if (row := result_of(arm, out)) is not None}
    (out / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    header = "| arm | seeds | exact match of 50 tokens | longest span | loss, kept / dropped | first difference at a "
    header += "dropped token | membership AUC (loss) | validation loss |"
    rows = [row_of(arm, results[arm.name]) for arm in ARMS if arm.name in results]
    text = "\n".join([header, "|---" * 8 + "|", *rows]) + "\n"
    (out / "results.md").write_text(text, encoding="utf-8")


def result_of(arm: Arm, out: Path) -> dict[str, Any] | None:
    folders = [folder.parent for folder in sorted(out.glob(f"{arm.name}-*/audit.json"))]
    if not folders:
        return None
    records = [json.loads((folder / "audit.json").read_text(encoding="utf-8")) for folder in folders]
    documents = sum(record["documents"] for record in records)
    exact = sum(round(record["exact_match"] * record["documents"]) for record in records)
    controls = sum(record["control"]["documents"] for record in records)
    exact_controls = sum(round(r["control"]["exact_match"] * r["control"]["documents"]) for r in records)
    replays = [record["mask_replay"] for record in records if record["mask_replay"]]
    validation = [
        [step["validation_loss"] for step in read_metrics(folder / "metrics.jsonl") if "validation_loss" in step][-1]
        for folder in folders
    ]
    diverged = sum(r["first_divergences"] for r in replays)
    at_dropped = sum(round((r["first_divergence_at_dropped"] or 0) * r["first_divergences"]) for r in replays)
    return {
        "title": arm.title,
        "seeds": len(records),
        "documents": documents,
        "exact_match": exact / documents,
        "exact_match_ci": wilson(exact, documents),
        "exact_match_each": [record["exact_match"] for record in records],
        "control_exact_match": exact_controls / controls,
        "law": None if arm.k is None else exact_match_law(arm.k, SUFFIX),
        "suffix_kept_whole": statistics.mean(r["suffix_kept_whole"] for r in replays) if replays else None,
        "median_longest_span": statistics.median(record["longest_span"]["median"] for record in records),
        "token_agreement": statistics.mean(record["token_agreement"]["mean"] for record in records),
        "nll_kept": statistics.mean(r["nll_kept"]["mean"] for r in replays) if replays else None,
        "nll_dropped": statistics.mean(r["nll_dropped"]["mean"] for r in replays) if replays else None,
        "first_divergences": diverged,
        "first_divergence_at_dropped": at_dropped / diverged if diverged else None,
        "suffix_drop_rate": statistics.mean(r["suffix_drop_rate"] for r in replays) if replays else None,
        "near_duplicates": [r["near_duplicates"] for r in replays if r["near_duplicates"]],
        "membership_auc": [record["membership"]["attacks"]["loss"]["auc"] for record in records],
        "validation_loss": validation,
    }


def row_of(arm: Arm, row: dict[str, Any]) -> str:
    low, high = row["exact_match_ci"]
    whole = row["suffix_kept_whole"]
    expected = "" if row["law"] is None else f"; expected: {row['law']:.1%}, counted: {whole:.0%}"
    at_dropped = row["first_divergence_at_dropped"]
    cells = [
        row["title"],
        str(row["seeds"]),
        f"**{row['exact_match']:.1%}** ({low:.0%} to {high:.0%}{expected})",
        f"{row['median_longest_span']:g}",
        "" if row["nll_kept"] is None else f"{row['nll_kept']:.2f} / {row['nll_dropped']:.2f}",
        ""
        if at_dropped is None
        else f"{at_dropped:.0%} of {row['first_divergences']} (chance {row['suffix_drop_rate']:.0%})",
        spread(row["membership_auc"], 2),
        spread(row["validation_loss"], 3),
    ]
    return "| " + " | ".join(cells) + " |"


def spread(values: Sequence[float], digits: int) -> str:
    """Return the mean of the values. If there are several values, add their range in parentheses."""
    mean = f"{statistics.mean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ({min(values):.{digits}f} to {max(values):.{digits}f})"


if __name__ == "__main__":
    main()
