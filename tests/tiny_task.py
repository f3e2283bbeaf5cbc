"""Make a multiple-choice task for lm-eval that needs no network, and a model that needs no weights."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

_TASK = """
task: tiny_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{rows}"}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{label}}}}"
doc_to_choice: "{{{{choices}}}}"
metric_list: [{{metric: acc}}]
"""


def make_task(folder: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """Write a task ``tiny_choice`` with rows of question, choices, and label. Return the folder for --include-path."""
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "tasks").mkdir()
    (folder / "tasks" / "tiny.yaml").write_text(_TASK.format(rows=folder / "rows.jsonl"))
    return folder / "tasks"


class Uniform:
    """A model for which token 65 is the most likely token, and all other tokens are equally likely."""

    vocab_size = 257
    max_length = None

    def score(self, documents: list[np.ndarray]) -> list[np.ndarray]:
        fields = [np.full((5, len(document) - 1), -math.log(257.0), dtype=np.float32) for document in documents]
        for each in fields:
            each[1] = 65
        return fields
