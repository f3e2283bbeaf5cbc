"""Write the HTML report of an audit, and print its tables in the terminal."""

import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from fourfold.data.atomic_files import write_output
from fourfold.errors import UserError
from fourfold.memorization.membership import ATTACKS
from fourfold.reports import html
from fourfold.reports.basic_charts import line_chart
from fourfold.reports.numbers import counted
from fourfold.reports.tables import print_table

NEAR_EXPLANATION = (
    "A document leaks if at least one sample in a thousand repeats its last part, with at most this number of tokens "
    "inserted, removed, or replaced. A range means that the search could not decide for some documents."
)

Record = Mapping[str, Any]
TableRows = list[list[str]]
Part = tuple[str, tuple[str, ...], TableRows, str]
"""A table in four values: its title, its header, its rows, and an explanation (or ""). A table with the header
``FACTS`` has two columns without names: labels and values."""

FACTS = ("", "")
COUNT_HEADER = ("trained on", "documents", "exact match", "95 % interval", "longest span", "agreement", "exposure")
NEAR_HEADER = ("edited tokens", "members that leak", "95 % interval", "controls that leak", "mean probability")
ATTACK_HEADER = ("attack", "AUC", "95 % interval", "TPR at 1 % FPR", "TPR at 0.1 % FPR")


def write_audit_report(record: Record, folder: Path) -> Path:
    """Write audit.json and audit.html into a folder, and return the path of audit.html.

    Raises:
        UserError: The folder cannot be created, or a file cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {folder} cannot be created: {error.strerror}; give a new folder") from None
    write_output(folder / "audit.json", json.dumps(record, indent=1, allow_nan=False) + "\n")
    page = folder / "audit.html"
    write_output(page, html.page("Memorization audit", record["model"], _sections(record)))
    return page


def audit_tables(record: Record) -> None:
    """Print the results of an audit as tables, and then its warnings."""
    console = Console()
    for title, header, rows, explanation in _parts(record):
        print_table(title, header, rows)
        if explanation:
            console.print(explanation)
    for warning in record["warnings"]:
        console.print(Text.assemble(("Note: ", "bold"), warning))


def _parts(record: Record) -> Iterator[Part]:
    """Yield a table for each part of the audit that the record has results for."""
    yield f"Exact match of the last {record['suffix']} tokens, {record['model']}", COUNT_HEADER, _count_rows(record), ""
    if record["generation"]:
        yield "Greedy continuations", FACTS, _generation_facts(record["generation"]), ""
    if record["near_verbatim"]:
        title = f"The last {record['suffix']} tokens nearly word for word"
        yield title, NEAR_HEADER, _near_rows(record["near_verbatim"]), NEAR_EXPLANATION
    if record["membership"]:
        membership = record["membership"]
        yield "Membership inference", ATTACK_HEADER, _attack_rows(membership["attacks"]), membership["conclusion"]
    if record["mask_replay"]:
        yield "The goldfish mask, replayed", FACTS, _replay_facts(record["mask_replay"]), ""


def _count_rows(record: Record) -> TableRows:
    """Group the documents by how many times the model was trained on them, and return one table row per group. Unless
    there is exactly one group, the first row is for all members (all documents that the model was trained on). If there
    is a reference model, the last row has the reference model's results for all members."""
    groups = {counted(int(count), "time"): group for count, group in record["by_count"].items()}
    if len(groups) != 1:
        groups = {"all members": record, **groups}
    if record["reference"] is not None:
        groups["the reference model, all members"] = record["reference"]
    rows = []
    for name, group in groups.items():
        match = [f"{group['exact_match']:.1%}", _interval(group["exact_match_ci"])]
        span = f"{group['longest_span']['median']:g} (at most {group['longest_span']['max']})"
        exposure = ""
        if "median_exposure" in group:
            exposure = f"{group['median_exposure']:.1f} of {group['largest_possible_exposure']:.1f}"
        agreement = f"{group['token_agreement']['mean']:.1%}"
        rows.append([name, str(group["documents"]), *match, span, agreement, exposure])
    return rows


def _attack_rows(attacks: Record) -> TableRows:
    rows = []
    for name, attack in attacks.items():
        low, high = attack["auc_ci"]
        rates = [_rate(attack[key]) for key in ("tpr_at_1_percent_fpr", "tpr_at_0_1_percent_fpr")]
        rows.append([ATTACKS[name], f"{attack['auc']:.3f}", f"{low:.3f} to {high:.3f}", *rates])
    return rows


def _generation_facts(generation: Record) -> TableRows:
    members, control = generation["members"], generation.get("control")
    facts = {
        "documents": str(members["documents"]),
        "exact match": f"{members['exact_match']['mean']:.1%}",
        "approximate match (at most 10 % of the tokens edited)": f"{members['approximate_match']:.1%} "
        f"({_interval(members['approximate_match_ci'])})"
        + (f"; controls: {control['approximate_match']:.1%} of {control['documents']}" if control else ""),
        "ROUGE-L": _mean(members["rouge_l"]),
        "edit similarity": _mean(members["edit_similarity"]),
        "longest common span": _mean(members["longest_common_span"]),
        "agreement with the one pass": f"{generation['agrees_with_one_pass']:.1%}",
    }
    return [[*fact] for fact in facts.items()]


def _near_rows(near: Record) -> TableRows:
    """Return one table row for each largest allowed number of edited tokens."""
    rows = []
    for row in near["tolerances"]:
        members = row["members"]
        edits = f"at most {row['edits']}" if row["edits"] else "none"
        controls = _bounds(row["control"]) if "control" in row else ""
        interval = _interval(members["extractable_ci"])
        rows.append([edits, _bounds(members), interval, controls, f"{members['mean_p']:.2g}"])
    return rows


def _replay_facts(replay: Record) -> TableRows:
    """Return table rows with labels and values about the effect of the goldfish mask."""
    found = {
        "mask": f"{replay['strategy']}, k {replay['k']}, h {replay['h']}",
        "dropped": f"{replay['drop_rate']:.1%} of the tokens",
        "loss of kept tokens": _mean(replay["nll_kept"]),
        "loss of dropped tokens": _mean(replay["nll_dropped"]),
        "first divergence at a dropped token": "no suffix diverges"
        if replay["first_divergence_at_dropped"] is None
        else f"{replay['first_divergence_at_dropped']:.1%} of {replay['first_divergences']} "
        f"({_interval(replay['first_divergence_at_dropped_ci'])}; chance: {replay['suffix_drop_rate']:.1%})",
        "longest undropped span": f"{replay['longest_undropped_span']} tokens",
        "suffixes without a dropped token": f"{replay['suffix_kept_whole']:.1%} of these documents; (1 − 1/k)^S = "
        f"{replay['expected_exact_match']:.2g} of all",
    }
    near = replay["near_duplicates"]
    if near is not None:
        found[f"near-duplicates, {near['noise']:.0%} of the tokens replaced"] = (
            f"{near['trained_share']:.1%} of the copies train a dropped token "
            f"({_interval(near['trained_share_ci'])}; expected: {near['expected_trained_share']:.1%})"
        )
    return [[*fact] for fact in found.items()]


def audit_summary(record: Record) -> list[str]:
    """Return the most important results of an audit, as HTML sections for the report of a run."""
    return [html.facts(_headline(record)), html.table(COUNT_HEADER, _count_rows(record))]


def _sections(record: Record) -> list[str]:
    sections = [html.facts(_headline(record)), *(html.notice(text) for text in record["warnings"])]
    sections.append(html.charts([], wide=[_prefix_chart(record)]))
    for title, header, rows, explanation in _parts(record):
        sections.append(f"<h2>{escape(title)}</h2>")
        sections.append(html.facts(dict(rows)) if header == FACTS else html.table(header, rows))
        if explanation:
            sections.append(f"<p>{escape(explanation)}</p>")
    if record["passages"]:
        sections.append(
            "<h2>The most similar continuations</h2><p>The text that the model got, the text that follows it in the "
            "document, and the text that the model wrote. The last two texts share the marked parts.</p>"
        )
        sections += [
            html.comparison(each["before"], {"document": each["true"], "model": each["written"]})
            for each in record["passages"]
        ]
    return sections


def _headline(record: Record) -> dict[str, str | int | float | None]:
    control = record["control"]
    return {
        "documents": record["documents"],
        f"exact match of the last {record['suffix']} tokens": f"{record['exact_match']:.1%} "
        f"({_interval(record['exact_match_ci'])})",
        "exact match of the control": f"{control['exact_match']:.1%} of {control['documents']}" if control else None,
        "token agreement": f"{record['token_agreement']['mean']:.1%}",
        "extraction strength": f"{record['extraction_strength']['mean']:.2f}",
        "extractable in a million samples": f"{record['extractable_within']['1000000']:.1%}",
    }


def _prefix_chart(record: Record) -> str:
    sides = {
        name: [(int(n), 100 * row[name]["exact_match"]) for n, row in record["by_prefix"].items() if name in row]
        for name in ("members", "control")
    }
    title = f"Exact match of the next {record['suffix']} tokens"
    lines = {name: points for name, points in sides.items() if points}
    return line_chart(title, lines, x_label="tokens of the prefix", y_label="% of the documents")


def _mean(value: Record | None) -> str:
    if value is None:
        return "n/a"
    return f"{value['mean']:.3g} ({value['ci'][0]:.3g} to {value['ci'][1]:.3g})"


def _interval(ends: Sequence[float]) -> str:
    return f"{ends[0]:.1%} to {ends[1]:.1%}"


def _bounds(side: Record) -> str:
    low, high = f"{side['extractable']:.1%}", f"{side['extractable_at_most']:.1%}"
    return f"{low if low == high else f'{low} to {high}'} of {side['documents']}"


def _rate(value: float | None) -> str:
    return "too few controls" if value is None else f"{value:.1%}"
