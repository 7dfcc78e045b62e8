"""ARCHITECTURE.md lists the files that a chat prompt passes in the gateway. The list is true, and short."""

import ast
import re
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FILES_MAX, RETURNS_MAX = 8, 2
_STEP = re.compile(r"^\d+\. `(?P<file>[^`]+\.py)` (?P<names>[^:]*):", re.MULTILINE)
ARRIVES = {"on_text_events", "_write_now"}
"""Functions that the step before does not call by name: messages arrive, and `_pump` has set the function to call."""

AWAITED = {"StreamedAnswer.__call__", "GuardedGeneration.updates", "RequestActor.deliver"}
"""Functions that no other of their step calls: the ASGI server, a loop over the updates, and the event loop do."""


def steps() -> list[tuple[str, list[str]]]:
    text = (ROOT / "ARCHITECTURE.md").read_text().split("## A chat prompt in the gateway", 1)[1].split("\n## ", 1)[0]
    return [(found["file"], re.findall(r"`([^`]+)`", found["names"])) for found in _STEP.finditer(text)]


def functions(file: str) -> dict[str, ast.AST]:
    """The functions of a file by their names, those of classes as Class.function."""
    found: dict[str, ast.AST] = {}
    for node in ast.parse((ROOT / file).read_text()).body:
        for name, one in (
            [("", node)] if not isinstance(node, ast.ClassDef) else [(node.name, each) for each in node.body]
        ):
            if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef):
                found[f"{name}.{one.name}".lstrip(".")] = one
    return found


def called(node: ast.AST) -> set[str]:
    """The names of the functions and classes that a function calls, without their objects."""
    calls = [each.func for each in ast.walk(node) if isinstance(each, ast.Call)]
    return {one.attr if isinstance(one, ast.Attribute) else getattr(one, "id", "") for one in calls}


def test_the_walk_has_few_files_and_few_returns():
    files = [file for file, _ in steps()]
    assert len(files) >= FILES_MAX
    assert len(set(files)) <= FILES_MAX
    assert len(files) - len(set(files)) <= RETURNS_MAX


@pytest.mark.parametrize(("file", "names"), steps())
def test_each_function_of_the_walk_exists(file: str, names: list[str]):
    assert names
    assert set(names) <= set(functions(file))


def test_each_step_of_the_walk_calls_the_next_one():
    walk = steps()
    for (file, names), (_, following) in pairwise(walk):
        first = following[0].rpartition(".")[2]
        calls = set().union(*(called(functions(file)[name]) for name in names))
        assert first in calls or first in ARRIVES, (file, first)


def test_the_functions_of_a_step_call_each_other():
    for file, names in steps():
        found = functions(file)
        for index, name in enumerate(names[1:], 1):
            calls = set().union(*(called(found[one]) for one in names[:index]))
            assert name in AWAITED or name.rpartition(".")[2] in calls, (file, name)
