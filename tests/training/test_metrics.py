"""metrics.jsonl: what is written to it, what a crash leaves behind, and what a resumed run keeps."""

import json
import math
import re
import sys
from contextlib import closing
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from pool import Pool

from fourfold.errors import UserError
from fourfold.training import step_checks
from fourfold.training.job import StepResult
from fourfold.training.metrics import MetricsWriter, StepMetrics, add_record, peak_memory_bytes, read_metrics

KEYS = ["step", "loss", "grad_norm", "lr", "tokens", "tokens_per_second", "model_tflops_per_device", "mfu"]
KEYS += ["peak_memory_bytes", "step_seconds", "trained_token_share"]


def step_metrics(step: int, **changes) -> StepMetrics:
    values = {
        "step": step,
        "loss": 3.5,
        "grad_norm": 1.25,
        "lr": 3e-4,
        "tokens": step * 1024,
        "tokens_per_second": 2048.0,
        "model_tflops_per_device": 1.5,
        "mfu": None,
        "peak_memory_bytes": 2**30,
        "step_seconds": 0.5,
        "trained_token_share": 0.75,
    }
    return StepMetrics(**values | changes)


def write_steps(run_dir, *steps, **options):
    with closing(MetricsWriter(run_dir, **options)) as writer:
        for step in steps:
            writer.write(step_metrics(step).record())
    return run_dir / "metrics.jsonl"


def steps_in(path):
    return [record["step"] for record in read_metrics(path)]


def test_one_object_a_step_with_every_key(tmp_path):
    with closing(MetricsWriter(tmp_path / "run")) as writer:
        writer.write(step_metrics(1).record())
        writer.write(step_metrics(2, mfu=0.4, more={"validation_loss": 3.25}).record())
    first, second = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert list(first) == KEYS
    assert first["mfu"] is None
    assert first["loss"] == 3.5
    assert set(second) - set(first) == {"validation_loss"}
    assert (second["mfu"], second["validation_loss"]) == (0.4, 3.25)


def test_a_line_is_on_disk_as_soon_as_it_is_written(tmp_path):
    with closing(MetricsWriter(tmp_path)) as writer:
        writer.write(step_metrics(1).record())
        assert steps_in(tmp_path / "metrics.jsonl") == [1]


def test_numbers_that_are_not_finite_become_null(tmp_path):
    with closing(MetricsWriter(tmp_path)) as writer:
        writer.write(step_metrics(1, loss=math.nan, grad_norm=math.inf, more={"validation_loss": math.nan}).record())
    text = (tmp_path / "metrics.jsonl").read_text()
    record = json.loads(text, parse_constant=pytest.fail)  # strict JSON has no NaN and no Infinity
    assert (record["loss"], record["grad_norm"], record["validation_loss"]) == (None, None, None)


def test_resume_drops_later_steps_and_has_none_twice(tmp_path):
    path = write_steps(tmp_path, 1, 2, 3, 4, 5)
    kept = path.read_text().splitlines()[:3]
    write_steps(tmp_path, 4, 5, 6, resume_step=3)
    assert steps_in(path) == [1, 2, 3, 4, 5, 6]
    assert path.read_text().splitlines()[:3] == kept
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_resume_after_a_torn_line(tmp_path):
    path = write_steps(tmp_path, 1, 2)
    with path.open("a") as file:
        file.write('{"step": 3, "loss": 3.')
    write_steps(tmp_path, 3, resume_step=2)
    assert steps_in(path) == [1, 2, 3]
    assert len(path.read_text().splitlines()) == 3


def test_resume_at_zero_starts_afresh(tmp_path):
    write_steps(tmp_path, 1, 2)
    assert steps_in(write_steps(tmp_path, 1, resume_step=0)) == [1]


def test_resume_in_an_empty_folder(tmp_path):
    assert steps_in(write_steps(tmp_path, 8, resume_step=7)) == [8]


def test_a_torn_last_line_is_left_out(tmp_path):
    path = write_steps(tmp_path, 1, 2)
    whole = path.read_bytes()
    for cut in range(1, 40):
        path.write_bytes(whole[:-1][:-cut])
        assert steps_in(path) == [1]
    path.write_bytes(whole[:-1])  # only the newline is missing
    assert steps_in(path) == [1, 2]
    # A file system may leave such bytes after a power cut.
    path.write_bytes(whole + b"\x00\xff\x00")
    assert steps_in(path) == [1, 2]


@pytest.mark.parametrize(
    ("line", "what"),
    [(b'{"step": 2, "lo', "not JSON"), (b"\xff\xfe", "not JSON"), (b"[1]", "an object"), (b'{"loss": 1.0}', '"step"')],
)
def test_a_bad_line_is_named_by_its_number(tmp_path, line, what):
    path = write_steps(tmp_path, 1, 2, 3)
    lines = path.read_bytes().splitlines()
    lines[1] = line
    path.write_bytes(b"\n".join(lines) + b"\n")
    with pytest.raises(UserError, match=f"line 2 is not .*{what.removeprefix('not ')}"):
        read_metrics(path)


def test_a_bad_last_line_with_its_end_is_not_torn(tmp_path):
    path = write_steps(tmp_path, 1)
    with path.open("a") as file:
        file.write("oops\n")
    with pytest.raises(UserError, match="line 2"):
        read_metrics(path)


def test_a_missing_file_is_the_users_error(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        read_metrics(tmp_path / "metrics.jsonl")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
def peaks_body(rank: int, world_size: int) -> int:
    result = StepResult(torch.ones(()), torch.ones(()), torch.ones(()))
    with patch.object(step_checks, "peak_memory_bytes", lambda device: 2**40 + rank):
        return step_checks.figures_of_all_ranks(result, False, False).peak_memory_bytes


def test_peak_memory_is_the_peak_of_the_fullest_rank(pool: Pool) -> None:
    assert pool.run(2, peaks_body) == [2**40 + 1] * 2


def test_peak_memory_on_cpu_is_the_high_water_mark_of_this_process():
    status = Path("/proc/self/status").read_text()
    kib = int(re.search(r"VmHWM:\s+(\d+) kB", status).group(1))
    assert peak_memory_bytes(torch.device("cpu")) == pytest.approx(kib * 1024, rel=0.02)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_peak_memory_on_a_gpu_is_what_was_allocated():
    torch.cuda.reset_peak_memory_stats()
    before = peak_memory_bytes(torch.device("cuda"))
    torch.empty(2**26, dtype=torch.uint8, device="cuda")
    assert peak_memory_bytes(torch.device("cuda")) - before == 2**26


def test_a_short_record_has_each_step_once_and_none_after_the_last(tmp_path):
    path = tmp_path / "experts.jsonl"
    for step in (1, 10, 20, 10):
        add_record(path, {"step": step, "value": step / 2})
    assert steps_in(path) == [1, 10]
    assert read_metrics(path)[-1] == {"step": 10, "value": 5.0}
    assert [file.name for file in tmp_path.iterdir()] == ["experts.jsonl"]
