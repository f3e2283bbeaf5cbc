"""Try all steps of Loki on a CPU in less than two minutes: train a small model, calibrate, measure, and generate.

    python examples/loki/long_context.py [--out runs] [--steps 120]

Needs ``pip install fourfold[huggingface]``. If you run the script again, it does not train the model again. After a
minute of training, the model spreads its attention over many tokens and makes little use of a long context. So the
results say little about real models.
"""

from __future__ import annotations

import argparse
import sysconfig
from dataclasses import asdict
from pathlib import Path

from transformers import PreTrainedModel

from fourfold.data.transformers_tokenizer import AnyTokenizer, load_any_tokenizer
from fourfold.huggingface.export_model import as_huggingface
from fourfold.huggingface.transformers_models import load_model
from fourfold.inference.generate import Sampling, generate
from fourfold.inference.loki import LokiBasis, LokiConfig, calibrate, disable_loki, enable_loki
from fourfold.inference.loki.quality import measure_quality
from fourfold.inference.text import token_windows
from fourfold.launch.job_processes import run_on_grid
from fourfold.reports.loki_report import loki_tables, rank_table
from fourfold.reports.terminal import generation_line
from fourfold.run_file.load import load_run

HERE = Path(__file__).parent
LIBRARY = Path(sysconfig.get_path("stdlib"))
CONTEXT = 1024


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--out", type=Path, default=Path("runs"))
    options.add_argument("--steps", type=int, help="Number of training steps. Use a small number to try the script.")
    given = options.parse_args()

    steps = [] if given.steps is None else [f"training.train_steps={given.steps}"]
    run = load_run(HERE / "model.toml", [f"output_dir={given.out}", *steps])
    if run_on_grid("fourfold.training.trainer:train", [run], 1).stopped:
        raise SystemExit(3)
    folder = given.out / run.name
    with as_huggingface(str(folder)) as (exported, tokenizer):
        model, text = load_model(exported), load_any_tokenizer(tokenizer)

    basis = calibrate(model, token_windows(text, [LIBRARY / "argparse.py"], CONTEXT)[:12])
    basis.save(folder / "basis.safetensors")
    record = {"basis": str(folder / "basis.safetensors"), "model": run.name, **basis.record()}
    rank_table(record)

    held_out = token_windows(text, [LIBRARY / "tarfile.py", LIBRARY / "typing.py"], CONTEXT)[:6]
    loki_tables(measure_quality(model, held_out, basis, LokiConfig(k_f=0.25, d_f=0.25)))

    continue_with_both(model, basis, text, (LIBRARY / "tarfile.py").read_text(encoding="utf-8")[:900])


def continue_with_both(model: PreTrainedModel, basis: LokiBasis, text: AnyTokenizer, prompt: str) -> None:
    """Continue a prompt twice: with dense attention, and with Loki, which attends to a quarter of the keys."""
    for name in ("full", "loki"):
        if name == "loki":
            enable_loki(model, basis, LokiConfig(k_f=0.25, d_f=0.25, min_seq=0))
        done = generate(model, text, prompt, CONTEXT - 900, Sampling())
        print(f"\n{name}: {done.text[:70]!r} …\n{generation_line(asdict(done))}")
    disable_loki(model)


if __name__ == "__main__":
    main()
