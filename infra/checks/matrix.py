"""The fault matrix: writes the table in docs/contributing/reliability.md; each row needs a test or a reason.

    python -m infra.checks.matrix [--check]

Rows are in docs/fault_matrix.tsv: id, fault, promise, and a reason if no test covers the row. A test names the rows
that it covers by the mark `matrix`: `@pytest.mark.matrix("R-01")`. A row with both a test and a reason, a row with
neither, and a mark without a row are errors. `--check` writes nothing and also fails if the page is out of date.
"""

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE, ROWS = "docs/contributing/reliability.md", "docs/fault_matrix.tsv"
BEGIN, END = "<!-- matrix: written by `python -m infra.checks.matrix` -->", "<!-- end of the matrix -->"
GROUPS = {
    "R": "Processes",
    "B": "The bus",
    "G": "Clients and gateways",
    "S": "Attacks",
    "K": "Stored KV",
    "P": "Properties",
    "L": "Long runs",
}
SHOWN = 4
"""Largest number of tests that the page names for one row."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the matrix. `reason`: why no test covers it; empty if a test does."""

    name: str
    fault: str
    promise: str
    reason: str


def read_rows(root: Path) -> list[Row]:
    """Returns the rows. Raises ValueError for a line without four columns."""
    rows: list[Row] = []
    for number, line in enumerate((root / ROWS).read_text(encoding="utf-8").splitlines(), 1):
        columns = line.split("\t")
        if len(columns) != 4:
            raise ValueError(f"{ROWS}:{number}: {len(columns)} columns, not 4")
        rows.append(Row(*columns))
    return rows


def find_marks(root: Path) -> dict[str, set[str]]:
    """Returns the tests of each row: those that name it in a decorator or in their module's `pytestmark`."""
    marks: dict[str, set[str]] = defaultdict(set)
    for path in sorted((root / "tests").rglob("test_*.py")):
        module = ast.parse(path.read_text(encoding="utf-8"), str(path))
        for test, row in _marks_of(module):
            marks[row].add(f"{path.relative_to(root).as_posix()}::{test}")
    return marks


def _marks_of(module: ast.Module) -> Iterator[tuple[str, str]]:
    for node in module.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for decorator in node.decorator_list:
                yield from ((node.name, row) for row in _rows_in(decorator))
        elif isinstance(node, ast.Assign):
            names = [ast.unparse(target) for target in node.targets]
            if "pytestmark" in names or names[0].startswith("Test"):
                yield from ((names[0], row) for row in _rows_in(node.value))


def _rows_in(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("mark.matrix"):
            yield from (str(argument.value) for argument in node.args if isinstance(argument, ast.Constant))


def problems(rows: list[Row], marks: dict[str, set[str]]) -> Iterator[str]:
    """Yields the contradictions between rows and marks."""
    names = {row.name for row in rows}
    for row in rows:
        if row.reason and marks.get(row.name):
            yield f"{row.name} has a reason why no test shows it, and tests that do: {sorted(marks[row.name])[0]}"
        if not row.reason and not marks.get(row.name):
            yield f"{row.name} has no test with @pytest.mark.matrix({row.name!r}), and {ROWS} gives no reason"
    for name in sorted(set(marks) - names):
        yield f"{sorted(marks[name])[0]} names the row {name}, which {ROWS} does not have"


def render(rows: list[Row], marks: dict[str, set[str]]) -> str:
    """Returns the tables for the page."""
    lines: list[str] = []
    for letter, title in GROUPS.items():
        lines += [f"### {title}", "", "| row | what happens | what is promised | shown by |", "|---|---|---|---|"]
        for row in rows:
            if row.name.startswith(letter):
                lines.append(f"| {row.name} | {row.fault} | {row.promise} | {_shown(row, marks)} |")
        lines.append("")
    return "\n".join(lines)


def _shown(row: Row, marks: dict[str, set[str]]) -> str:
    if row.reason:
        return f"not here: {row.reason}"
    tests = sorted(marks.get(row.name, ()))
    more = f" and {len(tests) - SHOWN} more" if len(tests) > SHOWN else ""
    return ", ".join(f"`{test.removeprefix('tests/')}`" for test in tests[:SHOWN]) + more


def main() -> int:
    """Writes or checks the page. Returns 1 after an error, else 0."""
    rows, marks = read_rows(ROOT), find_marks(ROOT)
    wrong = list(problems(rows, marks))
    page = ROOT / PAGE
    text = page.read_text(encoding="utf-8")
    head, _, rest = text.partition(BEGIN)
    tail = rest.partition(END)[2]
    new = f"{head}{BEGIN}\n\n{render(rows, marks)}\n{END}{tail}"
    if "--check" not in sys.argv[1:]:
        page.write_text(new, encoding="utf-8")
    elif new != text:
        wrong.append(f"{PAGE} is out of date: run `python -m infra.checks.matrix`")
    for line in wrong:
        print(line)
    shown = sum(not row.reason for row in rows)
    print(f"{len(rows)} rows of the fault matrix: {shown} shown by tests, {len(rows) - shown} with a reason why not")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
