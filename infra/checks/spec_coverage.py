"""Writes and checks docs/contributing/coverage.md: the rows of the specification, and the tests of each.

A row counts as proven if every test that names it (`@pytest.mark.spec("S-API-041")`) was collected and passed in a
recorded run; a skipped, deselected or failed test does not count. The rows are listed in docs/spec_rows.tsv. Columns
are separated by tabs; empty columns at the end of a line are left out:

    id, name    of the row
    state       empty; `waived`: the product departs from the row on purpose; `documented`: a fact that no test can
                show (about other hardware, for example) and that a document states
    reason      why the row is waived, or the document; for other rows a remark for the reader, which does not say that
                the product departs from the row: such a row is waived
    parts       names of the parts of a row, if it has several; marks then name a part ("S-SRV-101:ports"), and the row
                counts as proven if all its parts are

What each row asks for is in docs/spec_texts.tsv (id, text). The texts are compared with no test: a reader has to see
that the tests of a row show what it says.

Without options, the program reads the reports of `make test` and `make container-test` and writes the page. A
slow test (`@pytest.mark.slow`), which `make test` leaves out, has the outcome of the last run of `make slow-test`,
whose report is kept with the sources.
"""

import argparse
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from infra.checks.spec_marks import Marks, MisplacedMark, find_marks
from infra.checks.spec_plugin import CHANGED, commit_of

ROOT = Path(__file__).resolve().parents[2]
REPORT, CONTAINER_REPORT = Path("build/spec-report.json"), Path("build/spec-report-container.json")
SLOW_REPORT = Path("docs/contributing/slow_tests.json")
CONTAINER_TESTS = "tests/container/"
"""Directory of the tests that run only in `make container-test`, which needs Docker."""
STATES = ("", "waived", "documented")
KEPT = ("passed", "failed", "skipped", "xfailed")
"""Outcomes of tests that ran."""
ELSEWHERE = "not run here"
"""Outcome of a container test if their report is missing. Such a test counts neither for nor against a row."""
_DEPARTS = re.compile(r"\b(?:not|no|never|cannot|refused|ignored|instead|beyond|departs|proposes)\b")
"""Words of a remark with which it says that the product does something else than the row."""
_PROVEN_LINE = re.compile(r"^\| (\S+) \|.*\| proven(?: \(container test\))? \|", re.MULTILINE)


LEGEND = (
    "- *Proven*: every test named here passed in the run that this page was made from.",
    "- *Waived*: the product departs from the row on purpose, or a part of it needs what tests do not have, for the",
    "  reason given.",
    "- *Documented*: a fact that no test can show, stated in the document named.",
    "- *Open*: the rest. Tests named there show a part of the row, or did not pass where this page was made.",
    "",
    "[spec_texts.tsv](../spec_texts.tsv) has what each row asks for. Its letters stand for the documentation of five",
    "servers: A to D for their command lines and HTTP APIs, E for a Python API; PD is the default that was proposed",
    "for this one, and [proposal] a rule that none of them states. A word before a test is the part of the row that it",
    "shows. Tests in `tests/container` run in `make container-test`, those marked as slow in `make slow-test`, the",
    "others in `make test`.",
)
CLAIM = (
    "**What this page calls proven is claimed, and is not the result of a run**: it was made from the marks of the",
    "tests alone. `make spec-proofs` compares it with the last run of the tests, as the last step of `.ci/run` does.",
)
_RUN = re.compile(r"^Made from a run of the tests of commit (\S+)\.$", re.MULTILINE)


class SpecError(ValueError):
    """Rows, marks, report and page contradict each other. The message says where, and what to do."""


@dataclass(frozen=True)
class Row:
    """A row of docs/spec_rows.tsv."""

    id: str
    name: str
    state: str = ""
    reason: str = ""
    parts: tuple[str, ...] = ()

    @property
    def keys(self) -> tuple[str, ...]:
        """The names by which marks refer to the row, or to its parts if it has parts."""
        return tuple(f"{self.id}:{part}" for part in self.parts) or (self.id,)


Rows = dict[str, Row]
Outcomes = Mapping[str, Mapping[str, str]]
"""For each row (or row:part): the outcome of each test that names it, by the test's name without parameters.

The outcome of a test with several parameters is the first one that is not "passed".
"""


def main(argv: list[str] | None = None) -> int:
    """Writes or checks the page.

    Returns 0; if rows, marks, reports and page disagree, prints an error and returns 1.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    way = parser.add_mutually_exclusive_group()
    way.add_argument("--check", action="store_true", help="fail unless the page lists exactly the rows and marks")
    way.add_argument("--proofs", action="store_true", help="fail unless all that the page calls proven passed")
    way.add_argument("--claim", action="store_true", help="write the page as if every test passed: --proofs will tell")
    way.add_argument("--keep-slow", type=Path, metavar="REPORT", help=f"copy what ran of a report to {SLOW_REPORT}")
    parser.add_argument("--report", type=Path, help=f"of `make test`; {REPORT} unless given")
    parser.add_argument(
        "--container-report", type=Path, help=f"of `make container-test`; {CONTAINER_REPORT} if it exists"
    )
    parser.add_argument(
        "--without-container", action="store_true", help="--proofs: rows that only container tests prove stay unjudged"
    )
    parser.add_argument("--root", type=Path, default=ROOT, help="the project's folder")
    options = parser.parse_args(argv)
    page = options.root / "docs" / "contributing" / "coverage.md"
    try:
        if options.keep_slow is not None:
            keep_slow(options.keep_slow, options.root / SLOW_REPORT)
            return 0
        rows, marks = read_rows(options.root), find_marks(options.root)
        check_marks(rows, marks)
        if options.check:
            check_page(page, rows, marks)
        elif options.claim:
            page.write_text(render(rows, marks, provable(rows, marks)), encoding="utf-8")
        else:
            reports = _reports(options)
            outcomes = read_outcomes(reports, marks, options.root / SLOW_REPORT)
            if options.proofs:
                check_page(page, rows, marks)
                check_commit(reports, commit_of(options.root))
                check_proofs(claimed(page), rows, outcomes, without_container=options.without_container)
            else:
                page.write_text(render(rows, marks, proven(rows, outcomes), run_of(reports)), encoding="utf-8")
    except (SpecError, MisplacedMark) as error:
        print(f"error: {error}")
        return 1
    print(summary(rows, claimed(page)))
    return 0


def _reports(options: argparse.Namespace) -> list[Path]:
    """Returns the paths of the reports: that of `make test`, and that of `make container-test` if it exists."""
    container = options.root / CONTAINER_REPORT if options.container_report is None else options.container_report
    return [options.root / REPORT if options.report is None else options.report] + [container] * container.exists()


def read_rows(root: Path) -> Rows:
    """Returns the rows in the order of docs/spec_rows.tsv. Raises `SpecError` for an invalid line."""
    rows: Rows = {}
    first, *lines = (root / "docs" / "spec_rows.tsv").read_text(encoding="utf-8").splitlines()
    if first.split("\t") != ["id", "name", "state", "reason", "parts"]:
        raise SpecError("docs/spec_rows.tsv: the first line is not the names of the columns")
    for number, line in enumerate(lines, 2):
        row, where = _row(line.split("\t")), f"docs/spec_rows.tsv:{number}"
        if row.id in rows or row.state not in STATES:
            raise SpecError(f"{where}: {row.id} stands there twice, or {row.state!r} is not one of {STATES}")
        if row.state == "waived" and not row.reason:
            raise SpecError(f"{where}: {row.id} is waived without a reason")
        if row.state == "documented" and not _documents(root / row.reason, row.id):
            raise SpecError(f"{where}: {row.id} is documented, but {row.reason or 'no file'} does not name it")
        if not row.state and (found := _DEPARTS.search(row.reason)):
            raise SpecError(
                f"{where}: the remark of {row.id} says {found[0]!r}. If the product departs from the row, its state is "
                "'waived'; else say it in other words"
            )
        rows[row.id] = row
    _check_texts(root / "docs" / "spec_texts.tsv", rows)
    return rows


def _check_texts(path: Path, rows: Rows) -> None:
    """Raises `SpecError` unless the file has the text of each row, in the order of the rows."""
    lines = [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    if [line[0] for line in lines[1:]] != list(rows) or any(len(line) != 2 or not line[1] for line in lines):
        raise SpecError("docs/spec_texts.tsv does not have a text for each row of docs/spec_rows.tsv, in its order")


def check_marks(rows: Rows, marks: Marks) -> None:
    """Raises `SpecError` for a mark that names an unknown row or an unknown part, or a row instead of its parts."""
    known = {key for row in rows.values() for key in row.keys}
    for key in sorted(set(marks) - known):
        row = rows.get(key.partition(":")[0])
        tests = ", ".join(sorted(marks[key]))
        if row is None:
            raise SpecError(f"{tests} names {key}, which the specification does not have")
        have = f"has the parts {', '.join(row.keys)}" if row.parts else "has no parts in docs/spec_rows.tsv"
        raise SpecError(f"{tests} names {key}, but {row.id} {have}")


def provable(rows: Rows, marks: Marks) -> set[str]:
    """Returns the rows that would be proven if every test passed."""
    return {row.id for row in rows.values() if not row.state and all(marks.get(key) for key in row.keys)}


def read_outcomes(reports: list[Path], marks: Marks, slow_report: Path | None = None) -> Outcomes:
    """Returns the outcome of each marked test. A container test without a report has the outcome `ELSEWHERE`.

    A slow case that was left out has its outcome in `slow_report`; one that is missing there too counts neither for nor
    against a row if other cases of the same test ran.
    Raises `SpecError` for a report that is missing or has marks that the sources do not have.
    """
    found: dict[str, dict[str, str]] = {}
    has_slow = slow_report is not None and slow_report.exists()
    slow = json.loads(slow_report.read_text(encoding="utf-8"))["tests"] if has_slow and slow_report else {}
    for path in reports:
        if not path.exists():
            raise SpecError(f"there is no report {path}: run `make test` first (or `make test ARGS='-m spec'`, less)")
        for item, told in json.loads(path.read_text(encoding="utf-8"))["tests"].items():
            test = item.partition("[")[0]
            outcome = slow.get(item, told)["outcome"] if told["outcome"] == "slow" else told["outcome"]
            if outcome == "slow":
                continue
            for key in told["rows"]:
                if test not in marks.get(key, ()):
                    raise SpecError(f"{path} says that {test} names {key}, the source does not: run the tests again")
                before = found.setdefault(key, {}).get(test, "passed")
                found[key][test] = outcome if before == "passed" else before
    for key, tests in marks.items():
        for test in tests:
            elsewhere = len(reports) == 1 and test.startswith(CONTAINER_TESTS)
            found.setdefault(key, {}).setdefault(test, ELSEWHERE if elsewhere else "not collected")
    return found


def keep_slow(report: Path, kept: Path) -> None:
    """Writes to `kept` what a report says of the tests that ran."""
    told = json.loads(report.read_text(encoding="utf-8"))
    told["tests"] = {name: test for name, test in told["tests"].items() if test["outcome"] in KEPT}
    kept.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


def proven(rows: Rows, outcomes: Outcomes) -> set[str]:
    """Returns the rows whose tests all passed. A row with only container tests needs the container report."""
    return {row.id for row in rows.values() if not row.state and not _missing(row, outcomes) and _seen(row, outcomes)}


def check_commit(reports: list[Path], commit: str) -> None:
    """Raises `SpecError` for a report of another commit. `commit` is empty if the sources are in no repository."""
    for path in reports:
        of = json.loads(path.read_text(encoding="utf-8")).get("commit", "")
        if of.removesuffix(CHANGED) != commit.removesuffix(CHANGED):
            raise SpecError(
                f"{path} is of commit {of or 'unknown'}, and this is {commit or 'unknown'}: run the tests again"
            )


def run_of(reports: list[Path]) -> str:
    """Returns the commits of the reports, for the page; "unknown" if they have none."""
    commits = [json.loads(path.read_text(encoding="utf-8")).get("commit", "") for path in reports]
    return ",".join(dict.fromkeys(commit or "unknown" for commit in commits))


def check_proofs(claims: set[str], rows: Rows, outcomes: Outcomes, *, without_container: bool = False) -> None:
    """Raises `SpecError` unless every row of `claims` is proven.

    `without_container`: a row that only container tests prove may lack their report.
    """
    unseen = [
        row for row in rows if row in claims and not _missing(rows[row], outcomes) and not _seen(rows[row], outcomes)
    ]
    if unseen and not without_container:
        raise SpecError(
            f"only container tests prove {', '.join(unseen)}, and they have no report: run `make container-test`, or "
            "add --without-container where there is no Docker"
        )
    if unseen:
        print(f"not judged, as container tests did not run: {', '.join(unseen)}")
    wrong = [f"{row}: {why}" for row in rows if row in claims for why in _missing(rows[row], outcomes)]
    if wrong:
        raise SpecError(
            "docs/contributing/coverage.md calls rows proven that this run did not prove:\n  " + "\n  ".join(wrong)
        )


def check_page(page: Path, rows: Rows, marks: Marks) -> None:
    """Raises `SpecError` unless the page was made from these rows and marks. Does not check outcomes of tests."""
    claims = claimed(page)
    text = page.read_text(encoding="utf-8") if page.exists() else ""
    run = _RUN.search(text)
    if text == render(rows, marks, claims & provable(rows, marks), run[1] if run else ""):
        return
    raise SpecError("docs/contributing/coverage.md is out of date: run `make test` and `make coverage-of-spec`")


def claimed(page: Path) -> set[str]:
    """Returns the rows that the page calls proven."""
    return set(_PROVEN_LINE.findall(page.read_text(encoding="utf-8"))) if page.exists() else set()


def summary(rows: Rows, claims: set[str]) -> str:
    """Returns a line with the number of rows in each state."""
    states = ["proven" if row.id in claims else row.state or "open" for row in rows.values()]
    counts = {state: states.count(state) for state in ("proven", "waived", "documented", "open")}
    told = ", ".join(f"{count} {state}" for state, count in counts.items())
    return f"{len(rows)} rows of the specification: {told}"


def render(rows: Rows, marks: Marks, claims: set[str], run: str = "") -> str:
    """Returns the text of the page, in which the rows of `claims` are called proven.

    `run`: the commits whose tests ran; empty if the page only claims that they pass.
    """
    lines = [
        "# Coverage of the specification",
        "",
        f"{summary(rows, claims)}. Made by `make coverage-of-spec`; do not edit.",
        "",
        *((f"Made from a run of the tests of commit {run}.",) if run else CLAIM),
        "",
        *LEGEND,
        "",
        "| row | feature | state | tests | remark |",
        "|---|---|---|---|---|",
    ]
    for row in rows.values():
        state = _proven_by(row, marks) if row.id in claims else row.state or "open"
        cells = (row.id, _cell(row.name), state, _tests(row, marks), _cell(row.reason))
        lines.append(f"| {' | '.join(cell or '–' for cell in cells)} |")
    return "\n".join(lines) + "\n"


def _row(columns: list[str]) -> Row:
    if not 2 <= len(columns) <= 5:
        raise SpecError(f"docs/spec_rows.tsv: {columns[0]!r} has {len(columns)} columns")
    identity, name, state, reason, parts = [*columns, "", "", ""][:5]
    return Row(identity, name, state, reason, tuple(parts.split()))


def _documents(path: Path, row: str) -> bool:
    """Whether the document at `path` contains the id of the row."""
    return path.is_file() and re.search(rf"\b{re.escape(row)}\b", path.read_text(encoding="utf-8")) is not None


def _missing(row: Row, outcomes: Outcomes) -> list[str]:
    """Returns the reasons why a row is not proven; empty if there are none."""
    missing: list[str] = []
    for key in row.keys:
        tests = outcomes.get(key, {})
        missing += [
            f"{test} {outcome}" for test, outcome in sorted(tests.items()) if outcome not in ("passed", ELSEWHERE)
        ]
        if not tests:
            missing.append(f"no test names {key}")
    return missing


def _seen(row: Row, outcomes: Outcomes) -> bool:
    """Whether a test of each part of the row ran and passed."""
    return all("passed" in outcomes.get(key, {}).values() for key in row.keys)


def _proven_by(row: Row, marks: Marks) -> str:
    """Returns the state of a proven row as the page shows it."""
    plain = all(any(not test.startswith(CONTAINER_TESTS) for test in marks[key]) for key in row.keys)
    return "proven" if plain else "proven (container test)"


def _tests(row: Row, marks: Marks) -> str:
    told: list[str] = []
    for key in row.keys:
        part = key.partition(":")[2]
        told += [(f"{part}: " if part else "") + f"`{test}`" for test in sorted(marks.get(key, ()))]
    return "<br>".join(told)


def _cell(text: str) -> str:
    return text.replace("|", "/")


if __name__ == "__main__":
    sys.exit(main())
