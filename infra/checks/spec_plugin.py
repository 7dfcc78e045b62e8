"""A pytest plugin that records the outcome of the tests that prove rows of the specification.

A row is one feature in the list docs/spec_rows.tsv; a test names the rows that it proves with the mark `spec`.
`--spec-report=FILE` writes, for every collected test with this mark, the rows that it names and its outcome:

    {"tests": {"tests/unit/test_x.py::test_y[1]": {"rows": ["S-API-041"], "outcome": "passed"}}}

The plugin uses pytest's own marks, so a mark on a class, module or single parameter counts for exactly the tests that
inherit it. Outcomes are passed, failed, skipped, xfailed, deselected, and "not run" if the run ended before the test.
A test that could not be collected is absent. Loaded by tests/conftest.py; the report is read by `spec_coverage`.

The option must be written with `=`. pytest looks for paths of tests before it loads conftest files, so it does not know
the option yet and would treat a separate word as such a path.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest


@dataclass
class Recorded:
    """The rows and the outcome of one test."""

    rows: list[str]
    outcome: str = "not run"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the option `--spec-report`. Called by pytest."""
    parser.addoption(
        "--spec-report", type=Path, metavar="FILE", help="write what became of the tests that prove specification rows"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Registers a `Recorder` if the option is given. Called by pytest."""
    path = config.getoption("--spec-report")
    if path is not None:
        config.pluginmanager.register(Recorder(path), "spec-recorder")


class Recorder:
    """Records outcomes and writes them to a file at the end. pytest calls the methods."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tests: dict[str, Recorded] = {}

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        """Records the rows that a test names."""
        rows = sorted({str(row) for mark in item.iter_markers("spec") for row in mark.args})
        if rows:
            self._tests[item.nodeid] = Recorded(rows)

    def pytest_deselected(self, items: Iterable[pytest.Item]) -> None:
        """Records tests that `-k` or `-m` excluded from the run."""
        for item in items:
            if item.nodeid in self._tests:
                self._tests[item.nodeid].outcome = "deselected"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Records the outcome of a test. Called for its set-up, call and tear-down; the first that fails decides."""
        test = self._tests.get(report.nodeid)
        if test is None or test.outcome not in ("not run", "passed"):
            return
        outcome = "xfailed" if hasattr(report, "wasxfail") else report.outcome
        if outcome != "passed" or report.when == "call":
            test.outcome = outcome

    def pytest_sessionfinish(self) -> None:
        """Writes the report file."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        tests = {name: asdict(test) for name, test in sorted(self._tests.items())}
        self._path.write_text(json.dumps({"tests": tests}, indent=1) + "\n", encoding="utf-8")
