"""Write the page with the tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.sparse_attention.settings import BOUNDS, LOKI, METHODS, VARIANTS, Setup
from benchmarks.sparse_attention.table import SOLVED, Results
from benchmarks.sparse_attention.tasks import TASKS

TEMPLATE = Path(__file__).parent / "page.md.in"
RIVALS = tuple(name for name in METHODS if name not in VARIANTS and name not in BOUNDS)
MISSING = "–"
"""Stands for a method that does not fit into a budget."""


def write_page(results: Results, setup: Setup, lengths: Sequence[int], budgets: Sequence[float], stories: str) -> str:
    """Return the page: the template with all tables.

    Args:
        results: What was measured.
        setup: The chosen settings.
        lengths: Numbers of tokens of a context.
        budgets: Shares of dense bytes.
        stories: What ``benchmarks.sparse_attention.text`` has printed.
    """
    solved = {length: results.solved(length, TASKS) for length in lengths}
    parts = {
        "dense": dense_table(results, lengths),
        "means": "\n\n".join(mean_table(results, length, solved[length], budgets) for length in lengths),
        "verdicts": "\n".join(
            verdict(results, length, solved[length], budget) for length in lengths for budget in budgets
        ),
        "tasks": "\n\n".join(
            task_table(results, length, solved[length], budget) for length in lengths[-1:] for budget in budgets
        ),
        "stories": stories.strip(),
        "settings": settings_table(setup, budgets),
    }
    text = TEMPLATE.read_text(encoding="utf-8")
    for name, part in parts.items():
        text = text.replace(f"<<{name}>>", part)
    return text


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def dense_table(results: Results, lengths: Sequence[int]) -> str:
    """Return what dense attention answers, by task and length. Solved tasks are marked."""
    rows = []
    for task in TASKS:
        means = [results.mean("dense", 1.0, length, [task]) for length in lengths]
        rows.append([task, *(_bold_if_solved(100 * each.mean) for each in means if each is not None)])
    return table(["task", *(f"{length:,} tokens" for length in lengths)], rows)


def _bold_if_solved(percent: float) -> str:
    return f"**{percent:.0f}**" if percent >= 100 * SOLVED else f"{percent:.0f}"


def mean_table(results: Results, length: int, tasks: Sequence[str], budgets: Sequence[float]) -> str:
    """Return each method's mean over the solved tasks of one length, with the bytes that it really read."""
    if not tasks:
        return f"At {length:,} tokens, dense attention solves no task."
    rows = []
    for method in METHODS:
        cells = []
        for budget in budgets:
            found = results.mean(method, budget, length, tasks)
            read = results.shares.get((method, budget, length), 0.0)
            over = "" if results.is_within(method, budget, length) else " (over)"
            cells.append(MISSING if found is None else f"{found}, {100 * read:.1f} %{over}")
        rows.append([method, *cells])
    title = f"{length:,} tokens, mean of {len(tasks)} tasks: {', '.join(tasks)}"
    return f"**{title}**\n\n" + table(["method", *(f"{100 * budget:.0f} %" for budget in budgets)], rows)


def task_table(results: Results, length: int, tasks: Sequence[str], budget: float) -> str:
    """Return each method's share of right answers for each solved task."""
    rows = []
    for method in METHODS:
        found = [results.mean(method, budget, length, [task]) for task in tasks]
        rows.append([method, *(MISSING if each is None else f"{100 * each.mean:.0f}" for each in found)])
    return f"**{length:,} tokens, {100 * budget:.0f} % of the bytes**\n\n" + table(["method", *tasks], rows)


def verdict(results: Results, length: int, tasks: Sequence[str], budget: float) -> str:
    """Return a sentence about which rivals are better or worse than Loki by more than the interval of the
    difference."""
    better, worse, equal = [], [], []
    for method in RIVALS:
        found = results.difference(method, LOKI, budget, length, tasks) if tasks else None
        if found is None or not results.is_within(method, budget, length):
            continue
        named = f"{method} ({100 * found.mean:+.0f})"
        (better if found.low > 0 else worse if found.high < 0 else equal).append(named)
    parts = [
        f"{word}: {', '.join(names)}."
        for word, names in (("better", better), ("worse", worse), ("no clear difference", equal))
        if names
    ]
    return f"- {length:,} tokens, {100 * budget:.0f} %: {' '.join(parts) or 'not measured.'}"


def settings_table(setup: Setup, budgets: Sequence[float]) -> str:
    """Return the dims, channels, or page sizes that were chosen."""
    names = dict.fromkeys(name for name, _ in setup.dims)
    rows = [[name, *(str(setup.dims[name, budget]) for budget in budgets)] for name in names]
    return table(["method", *(f"{100 * budget:.0f} %" for budget in budgets)], rows)
