"""A pytest plugin that records the outcome of the tests that prove rows of the specification.

A row is one feature in the list docs/spec_rows.tsv; a test names the rows that it proves with the mark `spec`.
`--spec-report=FILE` writes, for every collected test with this mark, the rows that it names and its outcome:

    {"commit": "0123…", "all": {"passed": 1}, "seconds": 2,
     "tests": {"tests/unit/test_x.py::test_y[1]": {"rows": ["S-API-041"], "outcome": "passed"}}}

`all` counts the outcomes of all tests that ran, also of those without the mark; `seconds` is how long they took.
The commit ends with `CHANGED` if files differed from it when the run began; it is empty outside a repository.

The plugin uses pytest's own marks, so a mark on a class, module or single parameter counts for exactly the tests that
inherit it. Outcomes are passed, failed, skipped, xfailed, deselected, slow (a deselected one that has that mark), and
"not run" if the run ended before the test. A test that could not be collected is absent. Loaded by tests/conftest.py;
the report is read by `spec_coverage`.

With pytest-xdist, each worker process collects every test and runs some, and the process that started the workers sees
only the outcomes. Each worker sends the tests that it has collected when it ends. If no worker ends by itself, the
report has no tests, so that no row counts as proven.

The option must be written with `=`. pytest looks for paths of tests before it loads conftest files, so it does not know
the option yet and would treat a separate word as such a path.
"""

import json
import subprocess
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

SENT = "spec-tests"
"""The key of what a process of pytest-xdist sends when it ends: `Collected.tests`."""


CHANGED = "-changed"


def commit_of(root: Path) -> str:
    """Returns the commit of the sources in `root`; see above."""
    argv = ["git", "-C", str(root), "describe", "--always", "--abbrev=40", "--exclude=*", f"--dirty={CHANGED}"]
    try:
        return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the option `--spec-report`. Called by pytest."""
    parser.addoption(
        "--spec-report", type=Path, metavar="FILE", help="write what became of the tests that prove specification rows"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Registers the plugin objects that record tests, if the option is given. Called by pytest."""
    path = config.getoption("--spec-report")
    if path is None:
        return
    collected = Collected()
    config.pluginmanager.register(collected, "spec-collected")
    if hasattr(config, "workerinput"):
        config.pluginmanager.register(Sender(config, collected), "spec-sender")
    else:
        config.pluginmanager.register(Recorder(path, collected, commit_of(config.rootpath)), "spec-recorder")


class Collected:
    """The tests that name rows, as this process has collected them. pytest calls the methods."""

    def __init__(self) -> None:
        self.tests: dict[str, dict[str, Any]] = {}
        """By test: `rows`, the rows that it names, and `outcome`, "not run" or "deselected"."""

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        """Records the rows that a test names."""
        rows = sorted({str(row) for mark in item.iter_markers("spec") for row in mark.args})
        if rows:
            self.tests[item.nodeid] = {"rows": rows, "outcome": "not run"}

    def pytest_deselected(self, items: Iterable[pytest.Item]) -> None:
        """Records tests that `-k` or `-m` excluded from the run, slow ones (`make slow-test`) as "slow"."""
        for item in items:
            if item.nodeid in self.tests:
                is_slow = item.get_closest_marker("slow") is not None
                self.tests[item.nodeid]["outcome"] = "slow" if is_slow else "deselected"


class Sender:
    """Sends what one of several processes has collected. pytest calls the method."""

    def __init__(self, config: pytest.Config, collected: Collected) -> None:
        self._config, self._collected = config, collected

    def pytest_sessionfinish(self) -> None:
        """Puts the tests into the worker's output, which pytest-xdist then sends to the process that started it."""
        self._config.__dict__["workeroutput"][SENT] = self._collected.tests


class Recorder:
    """Records outcomes and writes them to a file at the end. pytest calls the methods."""

    def __init__(self, path: Path, collected: Collected, commit: str) -> None:
        self._path, self._collected, self._commit = path, collected, commit
        self._outcomes: dict[str, str] = {}
        self._started = time.monotonic()

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Takes what a process of pytest-xdist has collected, when it has ended; one that was killed sent nothing."""
        self._collected.tests.update(getattr(node, "workeroutput", {}).get(SENT, {}))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Records the outcome of a test. Called for its set-up, call and tear-down; the first that fails decides."""
        if self._outcomes.get(report.nodeid, "passed") != "passed":
            return
        outcome = "xfailed" if hasattr(report, "wasxfail") else report.outcome
        if outcome != "passed" or report.when == "call":
            self._outcomes[report.nodeid] = outcome

    def pytest_sessionfinish(self) -> None:
        """Writes the report file."""
        tests = {
            name: {"rows": test["rows"], "outcome": self._outcomes.get(name, test["outcome"])}
            for name, test in sorted(self._collected.tests.items())
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        report = {
            "commit": self._commit,
            "all": Counter(self._outcomes.values()),
            "seconds": round(time.monotonic() - self._started),
            "tests": tests,
        }
        self._path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
