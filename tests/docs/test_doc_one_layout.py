"""docs/one_layout.md computes a layout by hand. Each of its terms equals the planner's term."""

from __future__ import annotations

import itertools
import re

from markdown import REPOSITORY

COST = "fourfold/planning/cost/"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def test_the_terms_computed_by_hand_are_the_planners() -> None:
    page = (REPOSITORY / "docs" / "one_layout.md").read_text(encoding="utf-8")
    code = "\n".join(BLOCK.findall(page))
    compared = set(re.findall(r'planned\["(\w+)"\]', code))
    assert compared == {"compute", "logits", "launch", "z", "optimizer", "other"}
    exec(compile(code, "one_layout.md", "exec"), {})


def test_five_files_lead_from_the_command_line_to_a_number() -> None:
    """On each path, every file imports from the next one."""
    page = (REPOSITORY / "docs" / "one_layout.md").read_text(encoding="utf-8")
    first = re.findall(r"`(fourfold/\w[\w/]*\.py)`", page)
    rows = re.findall(r"^\| [^|]+ \| `([\w/]+\.py)`[^|]* \| `([\w/]+\.py)`[^|]* \|$", page, re.MULTILINE)
    assert len(first) == 3 and len(rows) == 5
    for last in rows:
        step = [] if last[0] in ("step.py", "memory.py") else ["step.py"]
        path = [*first, *(COST + name for name in (*step, *last))]
        for file, following in itertools.pairwise(path):
            module = following.removesuffix(".py").replace("/", ".")
            assert f"from {module} import" in (REPOSITORY / file).read_text(encoding="utf-8"), (file, following)
