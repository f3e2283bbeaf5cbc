"""The page of model types says what its script finds."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from pool import Pool

transformers = pytest.importorskip("transformers")

DOCS = Path(__file__).parents[2] / "docs"
sys.path.append(str(DOCS))

from model_types import PAGE, page_of, row_of  # noqa: E402 (the folder is on the path from here on)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("kind", ["gpt_oss", "qwen3_next", "llama", "bart"])
def test_a_row_is_what_the_script_finds(pool: Pool, kind: str) -> None:
    page = PAGE.read_text()
    if f"of transformers {transformers.__version__}," not in page:
        pytest.skip("the page was made with another release of transformers")
    row = row_of(kind, pool)
    assert f"\n{row.line()}\n" in page
    assert page_of([row]).count("ERROR") == 0


def test_the_page_has_a_row_for_every_type() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    page = PAGE.read_text()
    if f"of transformers {transformers.__version__}," not in page:
        pytest.skip("the page was made with another release of transformers")
    assert all(f"\n| `{kind}` | " in page for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
