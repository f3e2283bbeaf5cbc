"""If an optional library is missing, the error names its extra. Harmless warnings of optional libraries are not
printed."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE
from tiny_huggingface import make_model

from fourfold.errors import UserError
from fourfold.extras import import_extra

PARALLELIZE = """
import sys
import fourfold
from transformers import AutoConfig, AutoModelForCausalLM
import torch

grid = fourfold.Grid(fourfold.ParallelConfig(), "cpu")
with torch.device("meta"):
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(sys.argv[1]))
model = fourfold.parallelize(model, grid, weights=sys.argv[1])
tokens = torch.zeros(1, 8, dtype=torch.long)
model.backward(model(input_ids=tokens, labels=tokens).loss)
model.save_pretrained(sys.argv[2])
torch.distributed.destroy_process_group()
"""


def test_a_missing_library_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(UserError, match=r"^--tasks needs the lm-eval library: pip install 'fourfold\[evaluate\]'$"):
        import_extra("lm_eval", "evaluate", "--tasks needs")


def test_other_warnings_of_the_same_loggers_are_printed(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("torchao").warning("Failed to load a kernel")
    logging.getLogger("torchao").warning("the result is wrong")
    assert caplog.messages == ["the result is wrong"]


def test_torchs_warnings_about_its_own_collectives_are_not_printed() -> None:
    code = (
        "import warnings, fourfold\n"
        "for name in ('torch.distributed._all_gather_base', 'other.function'):\n"
        "    warnings.warn(f'`{name}` is deprecated', FutureWarning)"
    )
    errors = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stderr
    assert "other.function" in errors and "_all_gather_base" not in errors


@pytest.mark.slow
def test_parallelize_prints_nothing(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", "llama gqa tied", vocab_size=257)
    environment = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    command = [sys.executable, "-c", PARALLELIZE, str(folder), str(tmp_path / "saved")]
    ran = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=PATIENCE)
    assert (ran.returncode, ran.stderr) == (0, "")
