"""A pytest plugin that records what became of the tests that prove rows of the specification.

`--spec-report=FILE` writes, for every collected test with a `spec` mark, the rows that it names and its outcome:

    {"tests": {"tests/unit/test_x.py::test_y[1]": {"rows": ["S-API-041"], "outcome": "passed"}}}

Marks are pytest's own, so those of classes, modules and single parameters count for exactly the tests that have them.
Outcomes: passed, failed, skipped, xfailed, deselected, or "not run" where the run ended early. A test that could not be
collected is absent. Loaded by tests/conftest.py; read by `spec_coverage`.

Write the option with `=`: pytest looks for the paths of tests before it loads conftest files and knows the option, and
would take a separate word for such a path.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest


@dataclass
class Recorded:
    """One test."""

    rows: list[str]
    outcome: str = "not run"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Called by pytest."""
    parser.addoption(
        "--spec-report", type=Path, metavar="FILE", help="write what became of the tests that prove specification rows"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Called by pytest."""
    path = config.getoption("--spec-report")
    if path is not None:
        config.pluginmanager.register(Recorder(path), "spec-recorder")


class Recorder:
    """Its methods are called by pytest."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tests: dict[str, Recorded] = {}

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        """Notes the rows of a test."""
        rows = sorted({str(row) for mark in item.iter_markers("spec") for row in mark.args})
        if rows:
            self._tests[item.nodeid] = Recorded(rows)

    def pytest_deselected(self, items: Iterable[pytest.Item]) -> None:
        """A test that `-k` or `-m` left out proves nothing."""
        for item in items:
            if item.nodeid in self._tests:
                self._tests[item.nodeid].outcome = "deselected"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Called for set-up, call and tear-down of a test: the first one that does not pass decides."""
        test = self._tests.get(report.nodeid)
        if test is None or test.outcome not in ("not run", "passed"):
            return
        outcome = "xfailed" if hasattr(report, "wasxfail") else report.outcome
        if outcome != "passed" or report.when == "call":
            test.outcome = outcome

    def pytest_sessionfinish(self) -> None:
        """Writes the report."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        tests = {name: asdict(test) for name, test in sorted(self._tests.items())}
        self._path.write_text(json.dumps({"tests": tests}, indent=1) + "\n", encoding="utf-8")
