"""Which rows of the specification have a test: `spec_coverage.py SPEC_FOLDER [TESTS_FOLDER]`.

A row is a table line that starts with its id (`| S-API-041 | …`); a test names the rows that it proves in
`@pytest.mark.spec("S-API-041")`. Reads both as text. Ends with 1 only when a test names a row that does not exist.
"""

import ast
import re
import sys
from collections import Counter, defaultdict
from pathlib import Path

_ROW = re.compile(r"^\|\s*(S-[A-Z]{3}-\d{3}[a-z]?)\s*\|", re.MULTILINE)


def main() -> int:
    """The command."""
    spec, tests = Path(sys.argv[1]), Path(sys.argv[2] if len(sys.argv) > 2 else "tests")
    if not spec.is_dir():
        print(f"There is no specification in {spec}: name its folder, `make coverage-of-spec SPEC=…`.")
        return 2
    rows, proofs = rows_of(spec), proofs_of(tests)
    report(rows, proofs)
    unknown = sorted(set(proofs) - set(rows))
    for row in unknown:
        print(f"error: {', '.join(proofs[row])} names {row}, which the specification does not have")
    return 1 if unknown else 0


def rows_of(folder: Path) -> list[str]:
    """The ids, in order."""
    found = [row for path in sorted(folder.glob("*.md")) for row in _ROW.findall(path.read_text(encoding="utf-8"))]
    return list(dict.fromkeys(found))


def proofs_of(folder: Path) -> dict[str, list[str]]:
    """For each row, the tests that name it."""
    proofs: dict[str, list[str]] = defaultdict(list)
    for path in sorted(folder.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("mark.spec"):
                for argument in node.args:
                    if isinstance(argument, ast.Constant):
                        proofs[str(argument.value)].append(f"{path}:{node.lineno}")
    return proofs


def report(rows: list[str], proofs: dict[str, list[str]]) -> None:
    """Prints a line for each chapter and the rows without a test."""
    chapters = Counter(row[:5] for row in rows)
    for chapter, total in chapters.items():
        missing = [row for row in rows if row.startswith(chapter) and row not in proofs]
        print(f"{chapter}  {total - len(missing):3} of {total:3} rows have a test")
        if missing:
            print("       without: " + " ".join(missing))
    print(f"total  {sum(row in proofs for row in rows)} of {len(rows)}")


if __name__ == "__main__":
    sys.exit(main())
