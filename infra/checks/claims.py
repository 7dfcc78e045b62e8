"""What SECURITY.md says is defended has a test: checks its table of claims.

    python -m infra.checks.claims

The section `HEADING` has one table, a claim in each row; the last column names the tests of the claim, each as
`tests/…/test_file.py::test_name` between backquotes. A row that names no test, or one that does not exist, is an error.
The check does not run the tests, and it cannot tell whether a test shows what the row says.
"""

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = "SECURITY.md"
HEADING = "## What is defended, and its tests"
_TEST = re.compile(r"`(tests/[\w/.-]+\.py)::(\w+)`")


@dataclass(frozen=True, slots=True)
class Claim:
    """One row: its text without the last column, and the tests that the last column names, as (file, function)."""

    text: str
    tests: tuple[tuple[str, str], ...]


def read_claims(page: str) -> list[Claim]:
    """Returns the claims of the page's table."""
    section = page.partition(f"{HEADING}\n")[2].partition("\n## ")[0]
    rows = [line.strip().strip("|") for line in section.splitlines() if line.startswith("|")]
    cells = [row.rpartition("|") for row in rows[2:]]  # after the head and the line below it
    return [Claim(" – ".join(map(str.strip, text.split("|"))), tuple(_TEST.findall(last))) for text, _, last in cells]


def problems(claims: list[Claim], root: Path) -> Iterator[str]:
    """Yields what is wrong with the claims."""
    if not claims:
        yield f"{PAGE} has no table under {HEADING!r}"
    for claim in claims:
        if not claim.tests:
            yield f"no test is named for: {claim.text}"
        for file, test in claim.tests:
            if test not in names_in(root / file):
                yield f"there is no {file}::{test}, named for: {claim.text}"


def names_in(path: Path) -> set[str]:
    """Returns the names of a file's tests: functions, and variables such as hypothesis' `TestCase`."""
    if not path.exists():
        return set()
    names: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8"), str(path)).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return {name for name in names if name.lower().startswith("test")}


def main() -> int:
    """Prints what is wrong. Returns 1 after an error, else 0."""
    claims = read_claims((ROOT / PAGE).read_text(encoding="utf-8"))
    wrong = list(problems(claims, ROOT))
    for line in wrong:
        print(line)
    print(f"{len(claims)} claims of {PAGE}, {sum(len(claim.tests) for claim in claims)} tests named for them")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
