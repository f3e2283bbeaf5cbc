"""Faults are planted in the right place, which is given by a function and a syntax tree."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from types import ModuleType

import pytest
from mutation import definitions, mutated, mutated_tree

SOURCE = """
class Pump:
    def push(self, water, parts):
        # every part
        total = sum(part * 2 for part in parts)
        if total > 0:
            self.log(water)
            return total + water
        return water

    @property
    def size(self):
        return 1

def push(water):
    return water + 1
"""

REFORMATTED = '''
def push(water):
    return (water  # one more
            + 1)

class Pump:
    """A pump."""

    def push(self, water, parts):

        total = sum(
            # moved
            part * 2
            for part in parts
        )
        if (total > 0):
            self.log( water, )  # a comment

            return total + (
                water
            )
        return water

    @property
    def size(self):
        """How large it is."""
        return 1
'''


def function_of(tree: ast.Module, name: str) -> str:
    """Return the source of a function's body, reformatted and without its docstring."""
    found = dict(definitions(tree))[name]
    assert isinstance(found, ast.FunctionDef)
    has_docstring = ast.get_docstring(found) is not None
    return "\n".join(map(ast.unparse, found.body[has_docstring:])) + "\n"


@pytest.mark.parametrize("source", [SOURCE, REFORMATTED], ids=["as it was", "laid out in another way"])
@pytest.mark.parametrize(
    ("function", "old", "new", "expected"),
    [
        ("Pump.push", "part * 2", "part", "sum((part for part in parts))"),
        ("Pump.push", "self.log(water)\nreturn total + water", "return 0", "if total > 0:\n    return 0\nreturn water"),
        ("Pump.push", "self.log(water)", "pass", "    pass\n    return total + water"),
        ("Pump.push", "        self.log(water)", "", "    pass\n    return total + water"),
        ("Pump.push", "total = sum(part * 2 for part in parts)", "total = 3; water = 4", "total = 3\nwater = 4\n"),
        ("Pump.push", "total > 0", "total > (1 if water else 2)", "if total > (1 if water else 2):"),
        ("push", "water + 1", "water", "return water"),
    ],
)
def test_layout_comments_and_moved_lines_do_not_matter(
    source: str, function: str, old: str, new: str, expected: str
) -> None:
    assert expected in function_of(mutated_tree(source, function, old, new), function)


@pytest.mark.parametrize(
    ("function", "old", "message"),
    [
        ("Pump.push", "part * 3", "Pump.push has 0 times: part"),
        ("Pump.push", "water", "Pump.push has 3 times: water"),
        ("Pump.pull", "water", "there is no Pump.pull; there are Pump, Pump.push, Pump.size, push"),
        ("push", "part * 2", "push has 0 times"),
        ("", "total", "the module has 3 times"),
        ("Pump.push", "return water + 1", "has 0 times"),
    ],
)
def test_a_fault_that_is_not_there_once_is_refused(function: str, old: str, message: str) -> None:
    with pytest.raises(AssertionError, match=message.replace(".", r"\.")):
        mutated_tree(SOURCE, function, old, "0")


def loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    (folder / "pumps.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "pumps", raising=False)
    import pumps  # type: ignore[import-not-found]

    module: ModuleType = pumps
    return module


def test_only_the_named_function_changes_and_only_in_the_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pumps = loaded(tmp_path, monkeypatch)
    with mutated("pumps:push", "water + 1", "water + 2") as changed:
        assert (changed, pumps.push(0), pumps.Pump().push(3, [])) == (["push"], 2, 3)
    with mutated("pumps", "return 1", "return 7") as changed:
        assert (changed, pumps.Pump().size) == (["Pump.size"], 7)
    assert (pumps.push(0), pumps.Pump().size) == (1, 1)


def test_a_fault_that_changes_nothing_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded(tmp_path, monkeypatch)
    with pytest.raises(AssertionError, match="or the fault changes nothing"), mutated("pumps:push", "water", "water"):
        pass
