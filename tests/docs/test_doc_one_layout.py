"""docs/one_layout.md computes a layout by hand and compares each term with the planner's."""

from __future__ import annotations

import re

from markdown import REPOSITORY

BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def test_the_terms_computed_by_hand_are_the_planners() -> None:
    page = (REPOSITORY / "docs" / "one_layout.md").read_text(encoding="utf-8")
    code = "\n".join(BLOCK.findall(page))
    compared = set(re.findall(r'planned\["(\w+)"\]', code))
    assert compared == {"compute", "logits", "launch", "z", "optimizer", "other"}
    exec(compile(code, "one_layout.md", "exec"), {})
