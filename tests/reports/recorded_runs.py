"""Folders of runs that never ran, with records for report pages."""

import json


def make_run(run_dir, records, **files):
    """Write a run's folder. Arguments such as ``sample_txt`` are further files."""
    run_dir.mkdir(exist_ok=True, parents=True)
    (run_dir / "run.toml").write_text("[model]\nhidden_size = 64 # <tiny> & fast\n")
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    for name, text in files.items():
        (run_dir / name.replace("_", ".")).write_text(text)
    return run_dir


def record(step, **changes):
    """Return the line of one step."""
    values = {"loss": 3.0, "grad_norm": 1.0, "lr": 1e-3, "tokens_per_second": 5000.0, "peak_memory_bytes": 2**31}
    return {"step": step, "tokens": step * 1000, "mfu": None} | values | changes


def lines(records):
    """Return records as the text of a file."""
    return "".join(json.dumps(each) + "\n" for each in records)
