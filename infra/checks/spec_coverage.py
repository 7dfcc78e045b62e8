"""Which rows of the specification are proven, and by which tests: writes docs/coverage.md and prints the count.

A test proves a row by the marker `@pytest.mark.spec("S-…")`; the rows are listed in docs/spec_rows.tsv. Run by
`make coverage-of-spec`; with `--check` it fails when the document is out of date. It collects tests, it runs none.
"""

import argparse
import sys
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROWS = ROOT / "docs" / "spec_rows.tsv"
DOCUMENT = ROOT / "docs" / "coverage.md"


class Collector:
    """A pytest plugin that keeps every marked test."""

    def __init__(self) -> None:
        self.proofs: dict[str, set[str]] = defaultdict(set)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Called by pytest with what it found."""
        for item in items:
            for mark in item.iter_markers("spec"):
                for row in mark.args:
                    self.proofs[row].add(item.nodeid.partition("[")[0])


def read_rows() -> dict[str, str]:
    """Row id to its one-line name, in the specification's order."""
    lines = ROWS.read_text(encoding="utf-8").splitlines()
    return dict(line.split("\t", 1) for line in lines)


def collect() -> dict[str, set[str]]:
    """Runs pytest's collection over all tests."""
    collector = Collector()
    code = pytest.main(["--collect-only", "-qq", "--no-header", "-p", "no:terminal", str(ROOT / "tests")], [collector])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        raise SystemExit(f"the tests could not be collected (pytest exit code {code})")
    return collector.proofs


def render(rows: dict[str, str], proofs: dict[str, set[str]]) -> str:
    """The document."""
    proven = sum(row in proofs for row in rows)
    lines = [
        "# Coverage of the specification",
        "",
        f"{proven} of {len(rows)} rows are proven by a test. Made by `make coverage-of-spec`; do not edit.",
        "",
        "| row | feature | proven by |",
        "|---|---|---|",
    ]
    for row, name in rows.items():
        tests = "<br>".join(f"`{test}`" for test in sorted(proofs.get(row, ()))) or "–"
        lines.append(f"| {row} | {name.replace('|', '/')} | {tests} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Writes or checks the document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail when docs/coverage.md is out of date")
    options = parser.parse_args()
    rows, proofs = read_rows(), collect()
    unknown = sorted(set(proofs) - set(rows))
    if unknown:
        print(f"tests name rows that do not exist: {', '.join(unknown)}", file=sys.stderr)
        return 1
    document = render(rows, proofs)
    print(f"{sum(row in proofs for row in rows)} of {len(rows)} rows of the specification are proven by a test")
    if options.check:
        if DOCUMENT.read_text(encoding="utf-8") != document:
            print("docs/coverage.md is out of date: run `make coverage-of-spec`", file=sys.stderr)
            return 1
        return 0
    DOCUMENT.write_text(document, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
