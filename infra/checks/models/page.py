"""Writes the tables of docs/reference/models.md and docs/reference/recipes.md.

Run as `python -m infra.checks.models.page`; `--check` only compares. Cells are computed: see `rows` and `recipes`.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from transformers.utils import logging

from infra.checks.generated import keep
from infra.checks.models import recipes, rows

DOCS = Path(__file__).resolve().parents[3] / "docs" / "reference"
PAGE, RECIPES = DOCS / "models.md", DOCS / "recipes.md"
COMMAND = "python -m infra.checks.models.page"
_BEGIN, _END = f"<!-- {{}}: written by `{COMMAND}` -->", "<!-- end of {} -->"


def render(page: Path) -> str:
    """Returns the text of a page with its tables computed anew."""
    text = page.read_text(encoding="utf-8")
    for name, lines in (_tables() if page == PAGE else recipes.sections()).items():
        text = replaced(text, name, lines)
    return text


def replaced(text: str, name: str, lines: Iterator[str]) -> str:
    """Returns a page with other lines between the two markers of a table. Raises ValueError without the markers."""
    begin, end = _BEGIN.format(name), _END.format(name)
    head, found, rest = text.partition(begin)
    _, ended, tail = rest.partition(end)
    if not found or not ended:
        raise ValueError(f"the page has no lines {begin} and {end}")
    made = "\n".join(lines)
    return f"{head}{begin}\n\n{made}\n\n{end}{tail}"


def _tables() -> dict[str, Iterator[str]]:
    return {
        "families": rows.table(rows.family_rows()),
        "transformers": rows.table([rows.foreign_row()]),
        "own caches": rows.table(rows.own_cache_rows()),
        "whole texts": rows.table(rows.whole_text_rows()),
    }


def main() -> int:
    """Writes the pages, or with `--check` compares them. Returns the exit code."""
    logging.set_verbosity_error()  # pyright: ignore[reportUnknownMemberType]
    check = "--check" in sys.argv[1:]
    return max(keep(page, render(page), COMMAND, check=check) for page in (PAGE, RECIPES))


if __name__ == "__main__":
    sys.exit(main())
