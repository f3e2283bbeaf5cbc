"""The audit from end to end: on one process, on grids, on a Hugging Face model, and its refusals."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from command_line import Cli, exit_code
from pool import Pool
from report_pages import check_page, without_scripts
from tiny_corpus import line, make_corpus, run_file
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from fourfold.data.canaries import Canaries, ledger_path
from fourfold.data.prepare import prepare
from fourfold.data.run_data import open_run_tokenizer
from fourfold.data.tokenizer import load_tokenizer
from fourfold.environment import Place
from fourfold.errors import UserError
from fourfold.memorization.audit import run_audit
from fourfold.memorization.audit_request import AuditRequest
from fourfold.memorization.documents import AuditDocument, read_documents, with_others_before
from fourfold.memorization.scored_model import find_model
from fourfold.memorization.scores import AttackSampling
from fourfold.reports.audit_report import write_audit_report
from fourfold.run_file.load import load_run

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a corpus of canaries, and the run of a tiny Llama that learned them with a goldfish mask."""
    folder = tmp_path_factory.mktemp("audit")
    make_corpus(folder, "text", documents=200)
    prepare([folder / "text.jsonl"], folder / "c", tokenizer="bytes", workers=1, validation_fraction=0.1,
            canaries=Canaries(10, (0, 60), length=40, noise=0.02, source="random"))  # fmt: skip
    path = run_file(folder, str(folder / "c"), training__seq_length=64, training__train_steps=200,
                    training__global_batch_size=8, training__micro_batch_size=8,
                    **{"masks.goldfish__strategy": "hash", "masks.goldfish__h": 5})  # fmt: skip
    assert exit_code("train", path) == 0
    return folder


def request_of(folder: Path, *overrides: str, **options: Any) -> AuditRequest:
    sizes = {"suffix": 20, "prefix": 10, **options}
    model, documents = str(folder / "runs" / "run"), ledger_path(folder / "c")
    return AuditRequest(model=model, documents=documents, overrides=overrides, **sizes)


def audit_of_run(folder: Path, name: str = "run") -> list[object]:
    """Return the first words of the command."""
    return ["audit", "--model", folder / "runs" / name, "--documents", ledger_path(folder / "c")]


def on_grid(rank: int, world_size: int, request: AuditRequest) -> dict[str, Any] | None:
    place = Place(rank, rank, world_size, world_size, launcher="local")
    return run_audit(place, request, find_model(request.model, request))


def close(one: Any, other: Any) -> bool:
    """Return whether two results are equal up to rounding in float32."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(close(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(close, one, other))
    if isinstance(one, float):
        return other == pytest.approx(one, rel=1e-3, abs=1e-4)
    return one == other


@pytest.fixture(scope="module")
def record(trained: Path, pool: Pool) -> dict[str, Any]:
    request = request_of(trained, generate=10, beams=2, sampling=AttackSampling(1.0, 50, 0.95))
    return pool.run(1, on_grid, request)[0]


def test_what_was_repeated_is_known_and_what_was_dropped_is_not(record: dict[str, Any]) -> None:
    assert record["documents"] == 10
    assert record["control"]["documents"] == 10
    assert list(record["by_count"]) == ["0", "60"]
    replay = record["mask_replay"]
    assert replay["nll_dropped"]["mean"] > replay["nll_kept"]["mean"] + 1
    assert replay["first_divergence_at_dropped"] > 0.6 > 2 * replay["suffix_drop_rate"]
    assert record["loss"]["mean"] < record["control"]["loss"]["mean"]
    assert record["membership"]["attacks"]["loss"]["auc"] > 0.9
    assert {"loss", "zlib", "min_k", "min_k_plus_plus"} == record["membership"]["attacks"].keys()
    assert "does not protect membership" in record["membership"]["conclusion"]
    low, high = replay["near_duplicates"]["trained_share_ci"]
    assert low - 0.05 < replay["near_duplicates"]["expected_trained_share"] < high + 0.05
    assert replay["near_duplicates"]["noise"] == 0.02


def test_generation_confirms_the_one_pass(record: dict[str, Any]) -> None:
    generation = record["generation"]["members"]
    assert generation["documents"] == 10
    assert record["generation"]["agrees_with_one_pass"] == 1
    assert generation["exact_match"]["mean"] == record["exact_match"] <= generation["approximate_match"]
    assert record["generation"]["control"]["documents"] == 10
    assert record["generation"]["control"]["approximate_match"] < generation["approximate_match"]
    assert 0 < generation["rouge_l"]["mean"] <= 1
    shared = [
        "".join(text for text, same in each[side] if same)
        for each in record["passages"]
        for side in ("true", "written")
    ]
    assert len(shared) == 20
    assert shared[::2] == shared[1::2]
    edits = [sum(not same for _, same in each["true"]) for each in record["passages"]]
    assert edits[0] < edits[-1]


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(
    "grid",
    [
        pytest.param({"x": 2}, marks=pytest.mark.slow),
        {"y": 2},
        pytest.param({"z": 2}, marks=pytest.mark.slow),
        {"x": 2, "z": 2},
        pytest.param({"dp": 2, "y": 2}, marks=pytest.mark.slow),
        pytest.param({"dp": 2, "z": 2}, marks=pytest.mark.slow),
        pytest.param({"cp": 2}, marks=pytest.mark.slow),
        {"cp": 2, "x": 2},
        pytest.param({"pp": 2}, marks=pytest.mark.slow),
        {"pp": 2, "z": 2},
    ],
)
def test_every_grid_finds_the_same(trained: Path, record: dict[str, Any], pool: Pool, grid: dict[str, int]) -> None:
    overrides = [f"parallel.{axis}={size}" for axis, size in grid.items()]
    request = request_of(
        trained, *overrides, generate=10, beams=2, sampling=AttackSampling(1.0, 50, 0.95), micro_batch_size=4
    )
    found, *others = pool.run(int(np.prod(list(grid.values()))), on_grid, request)
    assert others == [None] * len(others)
    assert not [key for key in record if not close(record[key], found[key])]


def test_command(trained: Path, cli: Cli) -> None:
    arguments = [*audit_of_run(trained), "--suffix", 20]
    more = ["--generate", 4, "--beams", 4]
    out = trained / "runs" / "run" / "audit"
    code, output, errors = cli(*arguments, "--prefix", 10, "--json", "--out", out, *more)
    assert (code, errors) == (0, "")
    record = json.loads(output)
    assert record == json.loads((out / "audit.json").read_text())
    assert {"documents", "exact_match", "exact_match_ci", "by_count", "control"} <= record.keys()
    assert cli("report", out.parent)[0] == 0
    report = (out.parent / "report.html").read_text()
    assert "<h2>Memorization audit</h2>" in report and "<td>60 times</td>" in report
    page = (out / "audit.html").read_text()
    assert "Membership inference" in page
    assert "The last 20 tokens nearly word for word" in page
    assert page.count('class="comparison"') == len(record["passages"]) == 4
    assert "The goldfish mask, replayed" in page
    assert "http" not in without_scripts(page).replace("http-equiv", "")
    code, output, errors = cli(*arguments, "--prefix", 10, *more)
    assert (code, errors) == (0, "")
    assert "nearly word for word" in output
    assert "60 times" in output
    assert "does not protect membership" in " ".join(output.split())


@pytest.mark.slow
def test_nothing_of_the_page_is_cut(trained: Path, cli: Cli, browser: Browser) -> None:
    arguments = [*audit_of_run(trained), "--suffix", 20, "--prefix", 10, "--generate", 4, "--out", trained / "seen"]
    assert cli(*arguments)[0] == 0
    drawn = check_page(browser, trained / "seen" / "audit.html")
    assert {"tokens of the prefix", "% of the documents"} <= set(drawn["Exact match of the next 20 tokens"].texts)


@pytest.mark.slow
def test_canaries_are_audited_while_the_model_trains(trained: Path, cli: Cli) -> None:
    audit = ["--set", "audit.interval=4", "--set", f"audit.documents={ledger_path(trained / 'c')}"]
    arguments = ["train", trained / "run.toml", "--set", "name=watched", *audit, "--set", "audit.suffix=20"]
    assert cli(*arguments, "--set", "training.train_steps=6", "--set", "checkpoint.interval=5")[0] == 0
    path = trained / "runs" / "watched" / "memorization.jsonl"
    lines = [json.loads(row) for row in path.read_text().splitlines()]
    assert [row["step"] for row in lines] == [4, 6]
    assert lines[0]["tokens"] == 4 * 8 * 64
    assert lines[0]["by_count"].keys() == {"0", "60"}
    assert {"exact_match", "token_agreement", "loss"} <= lines[0]["by_count"]["60"].keys()
    assert lines[1]["by_count"]["60"]["loss"] != lines[0]["by_count"]["60"]["loss"]
    assert "Canaries repeated exactly" in (path.parent / "report.html").read_text()
    # Resume from step 5 on two processes, which writes the line of step 6 again, with the same results.
    again = ["--set", "training.train_steps=6", "--set", f"checkpoint.resume={path.parent / 'checkpoints' / 'step_5'}"]
    assert cli(*arguments, *again, "--set", "parallel.z=2", "--set", "training.micro_batch_size=4")[0] == 0
    repeated = [json.loads(row) for row in path.read_text().splitlines()]
    assert [row["step"] for row in repeated] == [4, 6]
    assert close(repeated[1], lines[1])
    # After training, an audit of the last checkpoint gives the same loss.
    _, output, _ = cli(*audit_of_run(trained, "watched"), "--suffix", 20, "--prefix", 20, "--json")
    assert json.loads(output)["loss"]["mean"] == pytest.approx(lines[1]["by_count"]["60"]["loss"], rel=1e-4)


def test_other_documents_before_each(trained: Path, record: dict[str, Any], pool: Pool) -> None:
    found = pool.run(1, on_grid, request_of(trained, offset=17, generate=2))[0]
    assert found["offset"] == 17
    assert found["generation"]["agrees_with_one_pass"] == 1
    assert found["loss"]["mean"] != record["loss"]["mean"]
    # The tokens before a document are not scored, so the documents keep their lengths.
    assert found["by_prefix"].keys() == record["by_prefix"].keys()
    # The tokens before a document do not change its mask.
    assert found["mask_replay"]["drop_rate"] == record["mask_replay"]["drop_rate"]
    with pytest.raises(UserError, match="add up to more than the 20 tokens that the model sees after --offset"):
        pool.run(1, on_grid, request_of(trained, offset=45))


def test_an_offset_is_refused_after_training_with_document_masks(trained: Path, pool: Pool) -> None:
    """An offset is refused if document masking was on when the audited model or the reference model was trained."""
    apart = "data.mask_documents=true"
    assert pool.run(1, on_grid, request_of(trained, apart))[0]["offset"] == 0
    with pytest.raises(UserError, match=r"--offset 17 .* data\.mask_documents never sees other documents; leave"):
        pool.run(1, on_grid, request_of(trained, apart, offset=17))
    apart_too = trained / "runs" / "apart"
    shutil.copytree(trained / "runs" / "run", apart_too)
    run_toml = (apart_too / "run.toml").read_text()
    (apart_too / "run.toml").write_text(run_toml.replace("mask_documents = false", "mask_documents = true"))
    with pytest.raises(UserError, match=r"data\.mask_documents never sees other documents"):
        pool.run(1, on_grid, request_of(trained, offset=17, reference=str(apart_too)))


def test_what_stands_before_a_document() -> None:
    documents = [AuditDocument(np.arange(10 * n, 10 * n + 4), None, 1, eod_id=0) for n in range(1, 4)]
    before = [row[:-4].tolist() for row in with_others_before(documents, 7)]
    assert before == [[33, 0, 20, 21, 22, 23, 0], [13, 0, 30, 31, 32, 33, 0], [23, 0, 10, 11, 12, 13, 0]]
    assert with_others_before(documents, 1)[1].tolist() == [0, 20, 21, 22, 23]
    assert with_others_before(documents, 0)[0].tolist() == [10, 11, 12, 13]
    with pytest.raises(UserError, match="--offset 20 needs 10 more tokens"):
        with_others_before(documents, 20)
    documents = [replace(document, eod_id=None) for document in documents]
    assert with_others_before(documents, 2)[1].tolist() == [32, 33, 20, 21, 22, 23]


def test_another_model_for_reference(trained: Path, tmp_path: Path, pool: Pool) -> None:
    """Use the model itself as the reference. Then the losses are equal, and the attack with the reference is no better
    than chance."""
    found = pool.run(1, on_grid, request_of(trained, reference=str(trained / "runs" / "run")))[0]
    assert found["reference"]["exact_match"] == found["exact_match"]
    assert found["reference"]["only_the_model_repeats"] == found["reference"]["only_the_reference_repeats"] == 0
    assert found["membership"]["attacks"]["reference"]["auc"] == 0.5
    write_audit_report(found, tmp_path)
    assert "reference model" in (tmp_path / "audit.html").read_text()


def test_a_checkpoint_alone(trained: Path, tmp_path: Path, record: dict[str, Any], cli: Cli) -> None:
    """Without the run file, the tokenizer and the mask of the training are unknown."""
    shutil.copytree(trained / "runs" / "run" / "checkpoints" / "step_200", tmp_path / "alone")
    arguments = ["audit", "--model", tmp_path / "alone", "--suffix", 20, "--prefix", 10, "--json"]
    code, output, errors = cli(*arguments, "--documents", ledger_path(trained / "c"))
    assert code == 0, errors
    found = json.loads(output)
    assert close(found["token_agreement"], record["token_agreement"])
    assert found["mask_replay"] is None
    code, output, errors = cli(*arguments, "--documents", ledger_path(trained / "c"), "--run", trained / "run.toml")
    assert json.loads(output)["mask_replay"]["agreement_kept"] == record["mask_replay"]["agreement_kept"]
    (tmp_path / "text.jsonl").write_text(line(text="a" * 60))
    code, output, errors = cli(*arguments, "--documents", tmp_path / "text.jsonl")
    assert (code, output) == (2, "")
    assert "name the tokenizer with --tokenizer" in errors
    code, output, errors = cli(*arguments, "--documents", tmp_path / "text.jsonl", "--tokenizer", "bytes")
    assert code == 0, errors


def test_a_file_of_controls(trained: Path, tmp_path: Path, cli: Cli) -> None:
    texts = [json.loads(row)["text"] for row in (trained / "text.jsonl").read_text().splitlines() if len(row) > 60]
    (tmp_path / "members.jsonl").write_text(
        "".join(line(text=text, count=1 + n % 2) for n, text in enumerate(texts[:12]))
    )
    (tmp_path / "control.jsonl").write_text("".join(line(text=text) for text in texts[12:40]))
    arguments = [
        "audit",
        "--model",
        trained / "runs" / "run",
        "--suffix",
        20,
        "--prefix",
        10,
        "--json",
    ]
    code, output, errors = cli(
        *arguments, "--documents", tmp_path / "members.jsonl", "--control", tmp_path / "control.jsonl"
    )
    assert code == 0, errors
    record = json.loads(output)
    assert (record["documents"], record["control"]["documents"]) == (12, 28)
    assert {count: group["documents"] for count, group in record["by_count"].items()} == {"0": 28, "1": 6, "2": 6}
    assert record["truncated_documents"] > 0  # the context has 65 tokens, and some texts are longer
    assert any("cut to the model's context" in warning for warning in record["warnings"])
    assert record["copied_documents"] == 0
    copied = (tmp_path / "members.jsonl").read_text() * 2
    (tmp_path / "copied.jsonl").write_text(copied)
    record = json.loads(cli(*arguments, "--documents", tmp_path / "copied.jsonl")[1])
    assert record["copied_documents"] == 12
    assert any("copies of other documents: 12." in warning for warning in record["warnings"])
    code, output, errors = cli(*arguments, "--documents", tmp_path / "members.jsonl")
    record = json.loads(output)
    assert record["control"] is None
    assert record["membership"] is None
    assert "There is no control" in record["warnings"][0]


def test_masks_command(trained: Path, cli: Cli) -> None:
    code, output, errors = cli("audit", "masks", trained / "run.toml")
    assert (code, errors) == (0, "")
    assert "left out by the goldfish mask" in output
    assert "[" in output
    code, output, errors = cli("audit", "masks", trained / "run.toml", "--json", "--samples", 0)
    record = json.loads(output)
    assert record["goldfish"]["drop_rate"] == pytest.approx(0.25, abs=0.05)
    assert record["expected"]["exact_match"]["50"] == pytest.approx(0.75**50)
    assert record["warnings"] == []
    many = ["--set", "masks.goldfish.h=60"]
    _, output, _ = cli("audit", "masks", trained / "run.toml", *many)
    assert "Warning: the goldfish mask drops" in output
    code, output, errors = cli(
        "audit", "masks", trained / "run.toml", "--set", "masks.goldfish.strategy=none", "--json"
    )
    assert json.loads(output)["goldfish"] is None
    for wrong, message in (("k=1", "must be an integer ≥ 2"), ("h=0", "must be an integer ≥ 1")):
        code, output, errors = cli("audit", "masks", trained / "run.toml", "--set", f"masks.goldfish.{wrong}")
        assert (code, output) == (2, "")
        assert message in errors


def test_gate(trained: Path, cli: Cli) -> None:
    arguments = [*audit_of_run(trained), "--prefix", 10]
    # By chance, the model gets one token right, but not twenty.
    assert cli(*arguments, "--suffix", 1, "--max-exact-match", 0.01, "--json")[0] == 4
    assert cli(*arguments, "--suffix", 1, "--max-exact-match", 1, "--json")[0] == 0


@pytest.mark.parametrize(
    ("lines", "options", "message"),
    [
        ("", {}, "has no document"),
        ("nonsense\n", {}, "line 1: not JSON"),
        (line(text=""), {}, "line 1 is an empty document"),
        (line(txt="a"), {}, 'neither "text" nor "tokens"; name the key with --text-key'),
        (line(text="a" * 90) + line(text="short"), {}, "line 2 has 5 tokens, but prefix and suffix need 30"),
        (line(tokens=[1] * 50 + [9999]), {}, "has token 9999, but the model's vocabulary ends at 256"),
        (line(tokens=["a"]), {}, "not a list of token ids"),
        (line(tokens=[1] * 50, tokenizer="other"), {}, "another tokenizer than the model's"),
        (line(text="a" * 90, count=-1), {}, 'has -1 as "count"; it must be a whole number'),
        (line(text="a" * 90, count=0), {}, "so the model was trained on none of them"),
        (line(text="a" * 90), {"--suffix": 0}, "--suffix 0 must be from 1"),
        (line(text="a" * 90), {"--prefix": 60}, "more than the 65 tokens that the model sees"),
        (line(text="a" * 90), {"--max-exact-match": 2}, "must be a share from 0 to 1"),
        (line(text="a" * 90), {"--temperature": 0}, "must be finite and at least 1e-06, such as 1"),
        (line(text="a" * 90), {"--temperature": "1e-320"}, "must be finite and at least 1e-06, such as 1"),
        (line(text="a" * 90), {"--temperature": "nan"}, "must be finite and at least 1e-06, such as 1"),
        (line(text="a" * 90), {"--offset": 1000}, "leaves none of the 64 tokens"),
        (line(text="a" * 90), {"--reference": "./nope"}, "--reference ./nope does not exist"),
        (line(text="a" * 90), {"--model": "./runs/none"}, "--model ./runs/none does not exist"),
        (line(text="a" * 90) + line(text="a" * 90, count=0), {}, "both members and controls"),
        (line(text="a" * 90 + "\ud800"), {}, "a lone surrogate"),
        (line(tokens=[1] * 50 + [True]), {}, "not a list of token ids"),
        (line(tokens=[1] * 50 + [10**30]), {}, "not a list of token ids"),
        (line(tokens=[5] * 50 + [-3]), {}, "has token -3"),
        ("[" * 100_000 + "\n", {}, "line 1: JSON that cannot be read"),
        ('{"count": ' + "9" * 5000 + "}\n", {}, "line 1: JSON that cannot be read"),
        (line(text="a" * 90), {"--model": "/nowhere"}, "/nowhere does not exist"),
        (line(text="a" * 90), {"--model": "."}, "neither a checkpoint"),
        (line(text="a" * 90), {"--control": "/nowhere.jsonl"}, "/nowhere.jsonl cannot be read"),
        (line(text="a" * 90), {"--set": "parallel.x=3"}, "cannot be split over x = 3"),
    ],
)
def test_refusals(trained: Path, tmp_path: Path, cli: Cli, lines: str, options: dict, message: str) -> None:
    documents = tmp_path / "documents.jsonl"
    documents.write_text(lines)
    given = {
        "--model": trained / "runs" / "run", "--documents": documents, "--suffix": 20, "--prefix": 10, **options
    }  # fmt: skip
    code, output, errors = cli("audit", *(part for option in given.items() for part in option))
    assert (code, output) == (2, ""), errors
    assert errors.startswith("fourfold: ")
    assert errors.count("\n") == 1
    assert message in errors


def test_a_document_as_text_ends_as_the_corpus_of_the_run_does(tmp_path: Path) -> None:
    """`prepare --eos-token` named another token than the tokenizer's own end token."""
    whole = Tokenizer(models.BPE())
    whole.pre_tokenizer = pre_tokenizers.ByteLevel()
    alphabet, special = pre_tokenizers.ByteLevel.alphabet(), ["<|endoftext|>", "<end>"]
    whole.train_from_iterator(["a b"], trainers.BpeTrainer(special_tokens=special, initial_alphabet=sorted(alphabet)))
    whole.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.jsonl").write_text(line(text="grid axis"))
    prepare([tmp_path / "a.jsonl"], tmp_path / "corpus", tokenizer=tmp_path / "tokenizer.json", eos_token="<end>")
    tokenizer = open_run_tokenizer(load_run(run_file(tmp_path, str(tmp_path / "corpus"))))
    (document,) = read_documents(tmp_path / "a.jsonl", tokenizer, vocab_size=300, shortest=1)
    assert (load_tokenizer(tmp_path / "tokenizer.json").eod_id, document.eod_id) == (0, 1)
