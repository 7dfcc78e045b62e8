"""Finds the rows of the specification that tests name in their source.

A test names rows with a mark: `@pytest.mark.spec("S-API-041", "S-SRV-101:ports")`. The module parses the source and
imports none of it, so that it works before the project is installed. A mark may be among the decorators of a test or a
test class, inside a `pytest.param` of such a decorator, or in `pytestmark` of a module or class. Called by
`spec_coverage`, which compares the result with what pytest recorded (`spec_plugin`).
"""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

Marks = dict[str, set[str]]
"""For each row (or row:part): the tests that name it (`tests/unit/test_x.py::test_name`)."""


class MisplacedMark(ValueError):
    """A mark whose test cannot be determined from the source."""


def find_marks(root: Path) -> Marks:
    """Returns the marks of every test below `root`/tests. Raises `MisplacedMark`."""
    marks: Marks = defaultdict(set)
    for path in sorted((root / "tests").rglob("test_*.py")):
        name = path.relative_to(root).as_posix()
        module = ast.parse(path.read_text(encoding="utf-8"), name)
        read: set[int] = set()
        for test, call in _marks_of_body(module, "", read):
            for row in _rows(call, name):
                marks[row].add(f"{name}::{test}")
        for call in _calls(module):
            if id(call) not in read:
                raise MisplacedMark(f"{name}:{call.lineno}: put the spec mark among the decorators of its test")
    return marks


def _marks_of_body(owner: ast.Module | ast.ClassDef, prefix: str, read: set[int]) -> Iterator[tuple[str, ast.Call]]:
    """Yields (test, mark) for every test in a module or class, and adds the ids of these marks to `read`."""
    inherited = [
        call
        for node in owner.body
        if isinstance(node, ast.Assign) and any(ast.unparse(target) == "pytestmark" for target in node.targets)
        for call in _calls(node.value)
    ]
    if isinstance(owner, ast.ClassDef):
        inherited += [call for decorator in owner.decorator_list for call in _calls(decorator)]
    read.update(map(id, inherited))
    for node in owner.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test"):
            own = [call for decorator in node.decorator_list for call in _calls(decorator)]
            read.update(map(id, own))
            yield from ((prefix + node.name, call) for call in (*inherited, *own))
        elif isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            yield from _marks_of_body(node, f"{prefix}{node.name}::", read)
            yield from ((test, call) for test in _tests_of(node, f"{prefix}{node.name}::") for call in inherited)


def _tests_of(owner: ast.ClassDef, prefix: str) -> Iterator[str]:
    for node in owner.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test"):
            yield prefix + node.name
        elif isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            yield from _tests_of(node, f"{prefix}{node.name}::")


def _calls(tree: ast.AST) -> Iterator[ast.Call]:
    """Yields the calls in a tree that are `spec` marks."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("mark.spec"):
            yield node


def _rows(call: ast.Call, name: str) -> list[str]:
    if not call.args or not all(isinstance(argument, ast.Constant) for argument in call.args):
        raise MisplacedMark(f"{name}:{call.lineno}: a spec mark names its rows as plain strings")
    return [str(argument.value) for argument in call.args if isinstance(argument, ast.Constant)]
