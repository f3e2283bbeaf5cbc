"""Write the page about the comparison, with its tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.sparse_attention.settings import BOUNDS, DEFAULTS, LOKI, METHODS, VARIANTS, Setup
from benchmarks.sparse_attention.table import SOLVED, Results
from benchmarks.sparse_attention.tasks import TASKS

TEMPLATE = Path(__file__).parent / "page.md.in"
RIVALS = tuple(name for name in METHODS if name not in VARIANTS and name not in BOUNDS)
MISSING = "–"
"""Text of a table cell if the method does not fit into the budget."""


def write_page(results: Results, setup: Setup, lengths: Sequence[int], budgets: Sequence[float], stories: str) -> str:
    """Fill the template with all tables, and return the page.

    Args:
        results: The measurements.
        setup: The settings of the methods.
        lengths: Lengths of the contexts, in tokens.
        budgets: Shares of the bytes that dense attention reads.
        stories: The output of ``benchmarks.sparse_attention.text``.
    """
    solved = {length: results.solved(length, TASKS) for length in lengths}
    hardest = max(lengths, key=lambda length: (len(solved[length]), length))
    parts = {
        "contexts": str(max(map(len, results.by_context.values()))),
        "dense": dense_table(results, lengths),
        "defaults": defaults_table(results, lengths, solved),
        "means": "\n\n".join(mean_table(results, length, solved[length], budgets) for length in lengths),
        "verdicts": "\n".join(
            verdict(results, length, solved[length], budget) for length in lengths for budget in budgets
        ),
        "tasks": "\n\n".join(task_table(results, hardest, solved[hardest], budget) for budget in budgets),
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
    """Return a table of dense attention's share of right answers, by task and length. Tasks that dense attention solves
    are bold."""
    rows = []
    for task in TASKS:
        means = [results.mean("dense", 1.0, length, [task]) for length in lengths]
        rows.append([task, *(_bold_if_solved(100 * each.mean) for each in means if each is not None)])
    return table(["task", *(f"{length:,} tokens" for length in lengths)], rows)


def _bold_if_solved(percent: float) -> str:
    return f"**{percent:.0f}**" if percent >= 100 * SOLVED else f"{percent:.0f}"


def defaults_table(results: Results, lengths: Sequence[int], solved: Mapping[int, Sequence[str]]) -> str:
    """Return a table of Loki with its default settings. For each task that dense attention solves, a cell shows the
    share of right answers, as a share of dense attention's."""
    rows = []
    for length in lengths:
        cells = []
        for task in TASKS:
            found, dense = (results.mean(method, 1.0, length, [task]) for method in (DEFAULTS, "dense"))
            if task not in solved[length] or found is None or dense is None:
                cells.append(MISSING)
            else:
                cells.append(f"{100 * found.mean / dense.mean:.0f} %")
        rows.append([f"{length:,}", f"{100 * results.shares[DEFAULTS, 1.0, length]:.1f} %", *cells])
    return table(["tokens", "bytes", *TASKS], rows)


def mean_table(results: Results, length: int, tasks: Sequence[str], budgets: Sequence[float]) -> str:
    """Return a table for one length: each method's mean share of right answers over the tasks that dense attention
    solves, and the bytes that the method read."""
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
    title = f"{length:,} tokens, mean of {len(tasks)} task{'s' * (len(tasks) > 1)}: {', '.join(tasks)}"
    return f"**{title}**\n\n" + table(["method", *(f"{100 * budget:.0f} %" for budget in budgets)], rows)


def task_table(results: Results, length: int, tasks: Sequence[str], budget: float) -> str:
    """Return a table of each method's share of right answers in each task that dense attention solves, with
    intervals."""
    rows = []
    for method in METHODS:
        found = [results.mean(method, budget, length, [task]) for task in tasks]
        rows.append([method, *(MISSING if each is None else str(each) for each in found)])
    return f"**{length:,} tokens, {100 * budget:.0f} % of the bytes**\n\n" + table(["method", *tasks], rows)


def verdict(results: Results, length: int, tasks: Sequence[str], budget: float) -> str:
    """Return a list item that compares the other methods with Loki. A method is better or worse if the 95 % interval of
    its difference to Loki does not contain 0."""
    better: list[str] = []
    worse: list[str] = []
    equal: list[str] = []
    for method in RIVALS:
        found = results.difference(method, LOKI, budget, length, tasks) if tasks else None
        if found is None or not results.is_within(method, budget, length):
            continue
        named = f"{method} ({100 * found.mean:+.0f})"
        (better if found.low > 0 else worse if found.high < 0 else equal).append(named)
    parts = [
        f"{word}: {', '.join(names)}."
        for word, names in (("Better", better), ("Worse", worse), ("No clear difference", equal))
        if names
    ]
    return f"- {length:,} tokens, {100 * budget:.0f} % of the bytes. {' '.join(parts) or 'Not measured.'}"


def settings_table(setup: Setup, budgets: Sequence[float]) -> str:
    """Return a table of the settings that were chosen: dims, channels, or page sizes."""
    names = dict.fromkeys(name for name, _ in setup.dims)
    rows = [[name, *(str(setup.dims[name, budget]) for budget in budgets)] for name in names]
    return table(["method", *(f"{100 * budget:.0f} %" for budget in budgets)], rows)
