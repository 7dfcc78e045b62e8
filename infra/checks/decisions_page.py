"""Writes docs/adr/README.md: every decision record with its title and its status.

A record whose first paragraph begins with `Status:` has the status that its first sentence says; any other is accepted.
Run as `python -m infra.checks.decisions_page`; `--check` only compares.
"""

import re
import sys
from pathlib import Path

from infra.checks.generated import keep

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "adr"
_HEAD = """# Decisions

Why Antiphon is as it is: one record for each decision, with what was rejected. `make docs` writes this page. A decision
that is replaced keeps its record, with a line `Status:` below its title that names the new one.

| number | decision | status |
|---|---|---|
"""


def render(folder: Path = FOLDER) -> str:
    """Returns the text of the page. Raises ValueError for a record without a title."""
    return _HEAD + "".join(map(_row, sorted(folder.glob("[0-9]*.md"))))


def _row(path: Path) -> str:
    title, _, rest = path.read_text(encoding="utf-8").partition("\n\n")
    found = re.fullmatch(r"# 0*(\d+)[.:] (.+)", title)
    if found is None:
        raise ValueError(f"{path.name}: the first line is not '# NUMBER. TITLE'")
    return f"| {found[1]} | [{found[2]}]({path.name}) | {_status(rest)} |\n"


def _status(text: str) -> str:
    first = " ".join(text.partition("\n\n")[0].split())
    if not first.startswith("Status: "):
        return "accepted"
    return re.split(r"\.(?: |$)", first.removeprefix("Status: "), maxsplit=1)[0]


def main() -> int:
    """Writes the page, or with `--check` compares it. Returns the exit code."""
    return keep(FOLDER / "README.md", render(), "make docs", check="--check" in sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
