"""The page of a run is complete, escaped, and self-contained, for one step and for a hundred thousand."""

import json
import re
from html.parser import HTMLParser

import pytest
from recorded_runs import lines, make_run, record
from report_pages import chart_specs, points, without_scripts
from typer import Typer
from typer.testing import CliRunner

from fourfold.cli.report import report
from fourfold.errors import UserError
from fourfold.reports.run_report import write_comparison, write_run_report


class Outline(HTMLParser):
    """Checks that tags are balanced and collects attributes and headings."""

    VOID = ("meta", "input")

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open, self.attributes, self.tags = [], [], []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def values(html, title):
    """Return the y values of each series of a chart."""
    return [[point[3] for point in line] for line in points(html, title).values()]


def test_every_curve_is_there(tmp_path):
    records = [record(1, loss=4.0), record(2, loss=3.5, validation_loss=3.75), record(3, loss=3.25)]
    path = write_run_report(make_run(tmp_path / "tiny", records))
    assert path == tmp_path / "tiny" / "report.html"
    html = path.read_text()
    assert values(html, "Loss") == [[4, 3.5, 3.25], [3.75]]
    assert values(html, "Gradient norm") == [[1] * 3]
    assert values(html, "Learning rate") == [[1e-3] * 3]
    assert values(html, "Throughput") == [[5000] * 3]
    assert values(html, "Memory") == [[2] * 3]
    assert "<h1>tiny</h1>" in html
    assert "hidden_size = 64 # &lt;tiny&gt; &amp; fast" in html
    assert not list(path.parent.glob("*.tmp"))


def test_a_mixture_has_a_curve_of_its_busiest_expert(tmp_path):
    html = write_run_report(make_run(tmp_path, [record(10, expert_load=1.0), record(20, expert_load=2.0)])).read_text()
    assert values(html, "Load of the busiest expert") == [[1, 2]]
    assert "Load of the busiest expert" not in write_run_report(make_run(tmp_path / "dense", [record(1)])).read_text()


def test_a_loss_of_preferences_is_not_a_perplexity(tmp_path):
    trained, preferred = (
        make_run(tmp_path / name, [record(1, loss=0.7, validation_loss=0.6931, **metrics)])
        for name, metrics in {"trained": {}, "preferred": {"dpo_margin": 0.0}}.items()
    )
    html = write_run_report(trained).read_text()
    assert "validation perplexity" in html and chart_specs(html)["Loss"]["unit"] == "nats per token"
    html = write_run_report(preferred).read_text()
    loss = chart_specs(html)["Loss"]
    assert "validation perplexity" not in html and (loss["unit"], loss["isLoss"]) == ("", False)
    write_comparison([trained, preferred], tmp_path / "both.html")
    assert chart_specs((tmp_path / "both.html").read_text())["Loss"]["isLoss"] is False


def test_the_validation_of_averaged_weights_is_a_curve(tmp_path):
    records = [record(1, loss=4.0), record(2, loss=3.5, validation_loss=3.75, ema_validation_loss=3.625)]
    html = write_run_report(make_run(tmp_path, records)).read_text()
    assert points(html, "Loss")["validation of averages"][0][3] == 3.625


def test_little_memory_is_shown_in_its_own_unit(tmp_path):
    html = write_run_report(make_run(tmp_path, [record(1, peak_memory_bytes=3 * 2**18)])).read_text()
    assert values(html, "Memory") == [[768]]
    assert chart_specs(html)["Memory"]["unit"] == "KiB, peak of the fullest device"
    assert "768.00 KiB" in html
    assert "0.00 " not in without_scripts(html)


def test_the_page_fetches_nothing(tmp_path):
    html = write_run_report(make_run(tmp_path, [record(1), record(2)])).read_text()
    assert not re.search(r"://|url\(|@import", without_scripts(html))
    names = {name for name, _ in Outline(html).attributes}
    assert not names & {"src", "href", "xlink:href", "srcset", "action"}
    assert "default-src 'none'" in html


def test_what_users_and_models_wrote_is_escaped(tmp_path):
    evil = "</pre><script>alert(1)</script>"
    run_dir = make_run(tmp_path / "<i>&run", [record(1)], sample_txt=evil, summary_json=json.dumps({evil: evil}))
    (run_dir / "run.toml").write_text(evil)
    html = write_run_report(run_dir).read_text()
    assert "alert(1)</script>" not in html
    assert html.count("&lt;/pre&gt;&lt;script&gt;alert(1)&lt;/script&gt;") == 4
    assert Outline(html).tags.count("script") == Outline(
        write_run_report(make_run(tmp_path / "b", [record(1)])).read_text()
    ).tags.count("script")
    assert "<h1>&lt;i&gt;&amp;run</h1>" in html


def test_summary_and_sample_are_shown(tmp_path):
    summary = {"parameters": 1234567, "grid": "x2 y2", "peak": None}
    run_dir = make_run(tmp_path, [record(1)], sample_txt="Once upon a time", summary_json=json.dumps(summary))
    html = write_run_report(run_dir).read_text()
    for text in ("1,234,567", "x2 y2", "Once upon a time", "<h2>Summary</h2>", "<h2>Sample</h2>"):
        assert text in html


PREDICTION = {
    "machine": "h200", "steps": 10, "predicted_step_seconds": 0.75, "measured_step_seconds": 1.0,
    "predicted_memory_bytes": 3 << 30, "measured_memory_bytes": 2 << 30,
}  # fmt: skip


def test_the_planners_prediction_is_compared_with_the_run(tmp_path):
    html = write_run_report(make_run(tmp_path, [record(1)], prediction_json=json.dumps(PREDICTION))).read_text()
    for text in ("Planned and measured", "h200", "0.75 predicted, 1 measured (-25%)", "3.00 GiB predicted", "(+50%)"):
        assert text in html


@pytest.mark.parametrize("text", ["{", "[]", "{}", json.dumps(PREDICTION | {"measured_step_seconds": 0})])
def test_a_damaged_prediction_is_one_sentence(tmp_path, text):
    with pytest.raises(UserError, match=r"prediction\.json is not a prediction"):
        write_run_report(make_run(tmp_path, [record(1)], prediction_json=text))


def test_one_step_is_enough(tmp_path):
    html = write_run_report(make_run(tmp_path, [record(1)])).read_text()
    assert "1 step recorded" in html
    assert "<h2>Summary</h2>" not in html
    assert values(html, "Loss") == [[3]]


def test_a_long_run_makes_a_small_page_that_keeps_the_spikes(tmp_path):
    records = [record(step, loss=3 + step % 7 / 100) for step in range(1, 100_001)]
    records[61_803]["loss"] = 42.5
    path = write_run_report(make_run(tmp_path, records))
    assert path.stat().st_size < 2_000_000
    losses = values(path.read_text(), "Loss")[0]
    assert 42.5 in losses
    assert len(losses) <= 2002


def test_a_loss_that_is_not_a_number_is_reported(tmp_path):
    html = write_run_report(make_run(tmp_path, [record(1), record(2, loss=None), record(3)])).read_text()
    assert "The loss was not a finite number at 1 step, first at step 2." in html
    assert "not a finite number" not in write_run_report(make_run(tmp_path, [record(1)])).read_text()


def test_a_running_run_with_a_torn_line(tmp_path):
    run_dir = make_run(tmp_path, [record(1), record(2)])
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')
    assert "2 steps recorded" in write_run_report(run_dir).read_text()


@pytest.mark.parametrize("missing", ["metrics.jsonl", "run.toml"])
def test_a_folder_that_is_no_run_is_refused(tmp_path, missing):
    (make_run(tmp_path, [record(1)]) / missing).unlink()
    with pytest.raises(UserError, match=f"{missing} does not exist"):
        write_run_report(tmp_path)
    assert not (tmp_path / "report.html").exists()


def test_a_folder_that_does_not_exist_is_said_to_be_missing(tmp_path):
    with pytest.raises(UserError, match=r"the folder .*nowhere does not exist"):
        write_run_report(tmp_path / "nowhere")


def test_a_metric_of_some_steps_is_drawn_at_these_steps(tmp_path):
    group = {"exact_match": 0.5, "loss": 1.0}
    found = [{"step": 1, "by_count": {"4": group}}, {"step": 2, "by_count": {"4": group, "8": group}}]
    html = write_run_report(make_run(tmp_path, [record(1), record(2)], memorization_jsonl=lines(found))).read_text()
    assert values(html, "Loss of the canaries") == [[1, 1], [1]]


def test_losses_that_are_never_finite_are_not_called_missing(tmp_path):
    html = write_run_report(make_run(tmp_path, [record(1, loss=None, grad_norm=None)])).read_text()
    assert html.count("no finite value recorded") == 2


def test_a_run_without_a_step_is_refused(tmp_path):
    with pytest.raises(UserError, match="no step yet"):
        write_run_report(make_run(tmp_path, []))


@pytest.mark.parametrize("text", ["{oops", "[1]", '{"a": {"b": 1}}'])
def test_a_summary_that_is_no_table_is_refused(tmp_path, text):
    with pytest.raises(UserError, match=r"summary\.json"):
        write_run_report(make_run(tmp_path, [record(1)], summary_json=text))


def test_curves_have_steps_tokens_and_the_time_in_steps(tmp_path):
    records = [record(1, step_seconds=1.5), record(2, step_seconds=None), record(3, step_seconds=2.0)]
    html = write_run_report(make_run(tmp_path, records)).read_text()
    places = [point[:3] for point in points(html, "Loss")["train"]]
    assert places == [[1, 1000, 1.5], [2, 2000, 1.5], [3, 3000, 3.5]]


def test_the_smoothing_of_a_long_run_knows_the_means_of_what_is_left_out(tmp_path):
    records = [record(step, loss=step % 10) for step in range(1, 10_001)]
    html = write_run_report(make_run(tmp_path, records)).read_text()
    curve = chart_specs(html)["Loss"]["curves"][0]
    assert len(curve["points"]) <= 2002 and len(curve["means"]) == 1000
    assert {mean for *_, mean in curve["means"]} == {4.5}
    assert chart_specs(html)["Learning rate"]["curves"][0]["means"] is None


def test_a_resumed_run_is_marked_where_it_was_resumed(tmp_path):
    # The run resumed at step 4, then at the earlier step 2, and again after it was done.
    starts = [0, 4, 2, 6, 6, 8]
    attempts = [{"restarts": 0, "steps_taken": step, "first_step": step} for step in starts]
    run_dir = make_run(tmp_path, [record(step) for step in range(1, 9)], attempts_jsonl=lines([{"torn": 1}, *attempts]))
    html = write_run_report(run_dir).read_text()
    assert [mark["place"][0] for mark in chart_specs(html)["Loss"]["marks"]] == [2, 6]
    assert "<dt>resumed after step</dt><dd>2, 6</dd>" in html


def test_tasks_have_a_chart_for_each_metric(tmp_path):
    tasks = [{"step": 2, "tasks": {"arc": {"acc": 0.25, "f1": 0.5}, "boolq": {"acc": 0.75}}}]
    html = write_run_report(make_run(tmp_path, [record(1), record(2)], tasks_jsonl=lines(tasks))).read_text()
    assert points(html, "acc") == {"arc": [[2, 2000, 0, 0.25]], "boolq": [[2, 2000, 0, 0.75]]}
    assert points(html, "f1") == {"arc": [[2, 2000, 0, 0.5]]}


def test_tasks_that_failed_are_named(tmp_path):
    tasks = [{"step": n, "tasks": {}, "failed": {"arc": f"task arc: lm-eval failed (E: <{n}>)"}} for n in (1, 2)]
    html = write_run_report(make_run(tmp_path, [record(1), record(2)], tasks_jsonl=lines(tasks))).read_text()
    assert "2 evaluations failed. After step 1: task arc: lm-eval failed (E: &lt;1&gt;)." in html


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("tasks_jsonl", {}),
        ("tasks_jsonl", {"tasks": [1]}),
        ("tasks_jsonl", {"tasks": {"arc": 0.5}}),
        ("tasks_jsonl", {"tasks": {}, "failed": ["arc"]}),
        ("memorization_jsonl", {"by_count": {"4": 0.5}}),
    ],
)
def test_a_record_of_another_form_is_one_sentence(tmp_path, file, line):
    run_dir = make_run(tmp_path, [record(1)], **{file: lines([{"step": 1} | line])})
    with pytest.raises(UserError, match=r"jsonl, line 1: .* does not map names to .*: fix or delete that line"):
        write_run_report(run_dir)


@pytest.mark.parametrize("text", ["{", "[]", '{"documents": 3}'])
def test_a_damaged_audit_is_one_sentence(tmp_path, text):
    (tmp_path / "audit").mkdir()
    (tmp_path / "audit" / "audit.json").write_text(text)
    with pytest.raises(UserError, match=r"audit\.json is not the record of an audit"):
        write_run_report(make_run(tmp_path, [record(1)]))


def test_the_page_can_be_read_without_seeing_the_charts(tmp_path):
    records = [record(1, loss=4.0), record(2, loss=3.0, validation_loss=3.5)]
    html = write_run_report(make_run(tmp_path, records)).read_text()
    label = "Loss. train: from 4 to 3 nats per token, validation: from 3.5 to 3.5 nats per token"
    assert f'role="img" aria-label="{label}"' in html
    assert "<details><summary><h2>Run file</h2></summary>" in html
    write_comparison([tmp_path], tmp_path / "page.html")
    assert '<th scope="col">run</th>' in (tmp_path / "page.html").read_text()


def test_everything_that_scrolls_can_be_reached_with_the_keyboard(tmp_path):
    write_comparison([make_run(tmp_path, [record(1)])], tmp_path / "page.html")
    for html in (write_run_report(tmp_path).read_text(), (tmp_path / "page.html").read_text()):
        assert html.count("<main>") == html.count("</main>") == 1
        scrolling = re.findall(r'<div class="scroll[^>]*>|<pre(?! class="wrap")[^>]*>', html)
        assert scrolling
        assert [tag for tag in scrolling if 'tabindex="0"' not in tag] == []


def test_scores_that_are_not_numbers_are_gaps(tmp_path):
    tasks = [{"step": 1, "tasks": {"arc": {"acc": "N/A"}}}, {"step": 2, "tasks": {"arc": {"acc": 0.5}}}]
    canaries = [{"step": 1, "by_count": {"4": {}}}, {"step": 2, "by_count": {"4": {"exact_match": 0.5, "loss": None}}}]
    records = {"tasks_jsonl": lines(tasks), "memorization_jsonl": lines(canaries)}
    html = write_run_report(make_run(tmp_path, [record(1), record(2)], **records)).read_text()
    assert values(html, "acc") == [[None, 0.5]] and values(html, "Canaries repeated exactly") == [[None, 50]]


def test_curves_of_several_runs_share_a_chart(tmp_path):
    one = make_run(tmp_path / "one", [record(1, loss=4.0), record(2, loss=3.0, validation_loss=3.5)])
    two = make_run(tmp_path / "two", [record(1, loss=5.0)])
    (two / "run.toml").write_text('name = "two"\n[model]\nhidden_size = 128\n')
    write_comparison([one, two], tmp_path / "page.html")
    html = (tmp_path / "page.html").read_text()
    assert values(html, "Loss") == [[4, 3], [3.5], [5]]
    assert list(points(html, "Loss")) == ["one", "one, validation", "two"]
    assert "<td>model.hidden_size</td><td>64</td><td>128</td>" in html
    assert "<td>name</td>" not in html
    assert "<td>33.12</td>" in html, "perplexity"


def test_runs_of_one_name_are_told_apart_by_their_folders(tmp_path):
    runs = [make_run(tmp_path / parent / "run", [record(1)]) for parent in ("a", "b")]
    write_comparison(runs, tmp_path / "page.html")
    assert list(points((tmp_path / "page.html").read_text(), "Loss")) == ["a/run", "b/run"]


def test_a_run_that_is_called_like_the_validation_of_another(tmp_path):
    """Each name is a button in the legend. If two curves had the same name, the button would hide both curves."""
    names = ("x", "x, validation", "x, validation loss")
    runs = [make_run(tmp_path / name, [record(1, loss=n, validation_loss=9)]) for n, name in enumerate(names)]
    write_comparison(runs, tmp_path / "page.html")
    found = points((tmp_path / "page.html").read_text(), "Loss")
    assert [found[name][0][-1] for name in names] == [0, 1, 2]
    assert list(found)[1] == "x, validation loss loss" and len(found) == 6


def test_a_run_given_twice_is_one(tmp_path):
    run = make_run(tmp_path / "run", [record(1)])
    write_comparison([run, tmp_path / "x" / ".." / "run"], tmp_path / "page.html")
    html = (tmp_path / "page.html").read_text()
    assert "<h1>run</h1>" in html and "1 fourfold training run compared" in html
    assert values(html, "Loss") == [[3]]


def test_a_run_inside_another_of_its_name_has_a_name(tmp_path):
    runs = [make_run(tmp_path / "run", [record(1)]), make_run(tmp_path / "run" / "run", [record(1)])]
    write_comparison(runs, tmp_path / "page.html")
    assert list(points((tmp_path / "page.html").read_text(), "Loss")) == ["run", "run/run"]


def test_the_command_prints_the_path(tmp_path):
    app = Typer()
    app.command()(report)
    run_dir = make_run(tmp_path, [record(1)])
    result = CliRunner().invoke(app, [str(run_dir)])
    assert result.exit_code == 0
    assert result.output.strip() == str(run_dir / "report.html")
    result = CliRunner().invoke(app, [str(run_dir), str(run_dir)])
    assert result.output.strip() == str(run_dir / "comparison.html") and (run_dir / "comparison.html").is_file()
    result = CliRunner().invoke(app, [str(run_dir), "--out", "page.html"])
    assert isinstance(result.exception, UserError)


def test_runs_of_different_lengths_are_compared_at_their_last_common_step(tmp_path):
    """Validation losses are compared at the last common validation."""
    short = [record(step, loss=5 - step, **({"validation_loss": 8.25} if step == 2 else {})) for step in (1, 2, 3)]
    long = [record(step, loss=9 - step, **({"validation_loss": 8.5 - step} if step % 2 == 0 else {}))
            for step in range(1, 7)]  # fmt: skip
    runs = [make_run(tmp_path / "short", short), make_run(tmp_path / "long", long)]
    write_comparison(runs, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert "losses of the table are from step 3, the last step that all runs recorded" in text
    assert "loss at step 3" in text and "validation loss at step 2" in text and "last step<" not in text
    rows = [re.findall(r"<td[^>]*>([^<]*)", row) for row in re.findall(r"<tr>(?:(?!</tr>).)*</tr>", text, re.DOTALL)]
    table = {cells[0]: cells for cells in rows if cells and cells[0] in ("short", "long")}
    assert "2" in table["short"][2:] and "6" in table["long"][3:] and "3" not in table["long"]
    assert "8.25" in table["short"] and "6.5" in table["long"] and "2.5" not in table["long"]

    apart = [make_run(tmp_path / "a", [record(1)]), make_run(tmp_path / "b", [record(2)])]
    write_comparison(apart, tmp_path / "page.html")
    assert "are from different steps" in (tmp_path / "page.html").read_text()
