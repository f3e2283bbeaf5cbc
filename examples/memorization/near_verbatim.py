"""Measure whether goldfish masks keep a model from repeating texts nearly word for word.

    python examples/memorization/near_verbatim.py [--seeds 3] [--out runs/near-verbatim] [--models tutorial]

The script trains models on the corpora of protocol.py, with several masks and seeds. For each model, the audit
continues every planted document greedily. It also computes bounds of p_ε, the probability that a sampled text is at
most ε edits away from the document's last 50 tokens. The script writes OUT/near-verbatim.json and OUT/near-verbatim.md.
If you run it again, it does not train finished models again.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from protocol import CORPORA, SUFFIX, Arm, goldfish, make_corpora, spread, train_and_audit

from fourfold.memorization.intervals import wilson
from fourfold.training.metrics import read_metrics

BEAMS = 20
KS = (3, 4, 8, 32, 50)
ARMS = [
    arm
    for corpus in ("tutorial", "exact")
    for arm in (
        Arm(f"near-{corpus}", "standard", corpus=corpus),
        *(Arm(f"near-{corpus}-{k}", f"goldfish, k {k}", goldfish("hash", k), corpus, k) for k in KS),
    )
]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--seeds", type=int, default=3)
    arguments.add_argument("--out", type=Path, default=Path("runs/near-verbatim"))
    arguments.add_argument("--models", choices=("tutorial", "exact"), nargs="+", default=["tutorial", "exact"])
    arguments.add_argument("--steps", type=int, help="Number of training steps. Use a small number to try the script.")
    given = arguments.parse_args()
    make_corpora(given.out)
    for seed in range(given.seeds):
        for arm in ARMS:
            if arm.corpus in given.models:
                options = {"generate": CORPORA[arm.corpus].count, "beams": BEAMS, "micro_batch_size": 64}
                train_and_audit(arm, seed, given.out, given.steps, **options)
                write_results(given.out)
    print((given.out / "near-verbatim.md").read_text(encoding="utf-8"))


def write_results(out: Path) -> None:
    """Write the results as JSON and as Markdown tables, with one row per arm (way of training) over all its seeds.

    The columns about sampling show the share of documents for which the lower bound of p_ε is at least 0.1 %.
    """
    results = {arm.name: row for arm in ARMS if (row := result_of(arm, out)) is not None}
    (out / "near-verbatim.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    header = (
        "| loss | seeds | greedy: exact | greedy: at most 5 edits | sampled: no edits | at most 2 | at most 5 "
        "| at most 10 | suffixes with at most 5 gaps | membership AUC | validation loss |"
    )
    parts = []
    for corpus in ("tutorial", "exact"):
        rows = [row_of(arm, results[arm.name]) for arm in ARMS if arm.name in results and arm.corpus == corpus]
        if rows:
            parts.append("\n".join([header, "|---" * 11 + "|", *rows]) + "\n")
    (out / "near-verbatim.md").write_text("\n".join(parts), encoding="utf-8")


def result_of(arm: Arm, out: Path) -> dict[str, Any] | None:
    """Combine the audits of all seeds of an arm into one result."""
    folders = [folder for folder in sorted(out.glob(f"{arm.name}-[0-9]")) if (folder / "audit.json").is_file()]
    if not folders:
        return None
    records = [json.loads((folder / "audit.json").read_text(encoding="utf-8")) for folder in folders]
    generated = [record["generation"] for record in records]
    losses = [
        [step["validation_loss"] for step in read_metrics(folder / "metrics.jsonl") if "validation_loss" in step]
        for folder in folders
    ]
    return {
        "title": arm.title,
        "seeds": len(records),
        "exact_match": pooled([(r["exact_match"], r["documents"]) for r in records]),
        "approximate_match": pooled(
            [(r["members"]["approximate_match"], r["members"]["documents"]) for r in generated]
        ),
        "control_approximate_match": pooled(
            [(r["control"]["approximate_match"], r["control"]["documents"]) for r in generated]
        ),
        "near_verbatim": [
            {
                "edits": rows[0]["edits"],
                **{
                    f"{side}_{bound}": pooled([(row[side][key], row[side]["documents"]) for row in rows])
                    for side in ("members", "control")
                    for bound, key in (("at_least", "extractable"), ("at_most", "extractable_at_most"))
                },
            }
            for rows in zip(*(record["near_verbatim"]["tolerances"] for record in records), strict=True)
        ],
        "cost": statistics.mean(record["near_verbatim"]["cost"] for record in records),
        "membership_auc": [record["membership"]["attacks"]["loss"]["auc"] for record in records],
        "validation_loss": [each[-1] for each in losses],
    }


def few_gaps(k: int) -> float:
    """Return the probability that a suffix has at most 5 gaps (dropped tokens), if each token is dropped with
    probability 1/k."""
    return sum(math.comb(SUFFIX, n) * (1 / k) ** n * (1 - 1 / k) ** (SUFFIX - n) for n in range(6))


def pooled(rates: Sequence[tuple[float, int]]) -> dict[str, Any]:
    """Combine the shares of several seeds, each given with its number of documents. Return the share over all seeds,
    with its interval."""
    documents = sum(count for _, count in rates)
    found = sum(round(share * count) for share, count in rates)
    return {"share": found / documents, "ci": wilson(found, documents), "documents": documents}


def row_of(arm: Arm, row: dict[str, Any]) -> str:
    cells = [
        row["title"],
        str(row["seeds"]),
        with_interval(row["exact_match"]),
        with_interval(row["approximate_match"]),
        *(f"{near['members_at_least']['share']:.0%}" for near in row["near_verbatim"]),
        "" if arm.k is None else f"{few_gaps(arm.k):.2g}",
        spread(row["membership_auc"], 2),
        spread(row["validation_loss"], 3),
    ]
    return "| " + " | ".join(cells) + " |"


def with_interval(rate: dict[str, Any]) -> str:
    low, high = rate["ci"]
    return f"{rate['share']:.0%} ({low:.0%} to {high:.0%})"


if __name__ == "__main__":
    main()
