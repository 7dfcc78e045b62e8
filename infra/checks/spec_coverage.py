"""Which rows of the specification are proven, and by which tests: writes docs/coverage.md and prints the count.

A test proves a row by `@pytest.mark.spec("S-API-041")`; the rows are listed in docs/spec_rows.tsv. Tests are read as
text, none is run. Run by `make coverage-of-spec`; with `--check` it fails when the document is out of date.
"""

import argparse
import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
Proofs = dict[str, set[str]]


def main(argv: list[str] | None = None) -> int:
    """Writes or checks the document. Ends with 1 when a test names a row that does not exist."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail when the document is out of date")
    parser.add_argument("--root", type=Path, default=ROOT, help="the project's folder")
    options = parser.parse_args(argv)
    rows, proofs = read_rows(options.root / "docs" / "spec_rows.tsv"), find_proofs(options.root)
    unknown = sorted(set(proofs) - set(rows))
    for row in unknown:
        print(f"error: {', '.join(sorted(proofs[row]))} names {row}, which the specification does not have")
    if unknown:
        return 1
    print(f"{sum(row in proofs for row in rows)} of {len(rows)} rows of the specification are proven by a test")
    document, path = render(rows, proofs), options.root / "docs" / "coverage.md"
    if not options.check:
        path.write_text(document, encoding="utf-8")
    elif not path.exists() or path.read_text(encoding="utf-8") != document:
        print("docs/coverage.md is out of date: run `make coverage-of-spec`")
        return 1
    return 0


def read_rows(path: Path) -> dict[str, str]:
    """Row id to its one-line name, in the specification's order."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return dict(line.split("\t", 1) for line in lines)


def find_proofs(root: Path) -> Proofs:
    """Row id to the tests that name it."""
    proofs: Proofs = defaultdict(set)
    for path in sorted((root / "tests").rglob("test_*.py")):
        name = path.relative_to(root).as_posix()
        for test, row in _marks(ast.parse(path.read_text(encoding="utf-8"), name)):
            proofs[row].add(f"{name}::{test}" if test else name)
    return proofs


def render(rows: dict[str, str], proofs: Proofs) -> str:
    """The document."""
    lines = [
        "# Coverage of the specification",
        "",
        f"{sum(row in proofs for row in rows)} of {len(rows)} rows are proven by a test. "
        "Made by `make coverage-of-spec`; do not edit.",
        "",
        "| row | feature | proven by |",
        "|---|---|---|",
    ]
    for row, name in rows.items():
        tests = "<br>".join(f"`{test}`" for test in sorted(proofs.get(row, ()))) or "–"
        lines.append(f"| {row} | {name.replace('|', '/')} | {tests} |")
    return "\n".join(lines) + "\n"


def _marks(module: ast.Module) -> Iterator[tuple[str, str]]:
    """(test, row) of every mark: on a function, on a class, or, with an empty name, elsewhere (a table of cases)."""
    owners: dict[int, str] = {}
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            owners.update((id(inner), node.name) for d in node.decorator_list for inner in ast.walk(d))
    for node in ast.walk(module):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("mark.spec"):
            for argument in node.args:
                if isinstance(argument, ast.Constant):
                    yield owners.get(id(node), ""), str(argument.value)


if __name__ == "__main__":
    sys.exit(main())
