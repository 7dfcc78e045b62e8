"""The figures of the walk as they are committed: infra/walk/figures.json, and a table in ARCHITECTURE.md."""

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path

from infra.walk.figures import Figures

FILE = Path(__file__).with_name("figures.json")
PAGE = Path(__file__).resolve().parents[2] / "ARCHITECTURE.md"
BEGIN, END = "<!-- walk: written by `make walk ARGS=--write` -->", "<!-- end of the walk -->"


def write(numbers: Mapping[str, Figures]) -> None:
    """Writes the file and the table."""
    FILE.write_text(as_json(numbers), encoding="utf-8")
    PAGE.write_text(rendered(PAGE.read_text(encoding="utf-8"), numbers), encoding="utf-8")


def committed() -> dict[str, Figures]:
    """Returns the figures in the file."""
    return {name: Figures(**one) for name, one in json.loads(FILE.read_text(encoding="utf-8")).items()}


def as_json(numbers: Mapping[str, Figures]) -> str:
    """Returns the text of a JSON object with an object for each process."""
    return json.dumps({name: asdict(one) for name, one in numbers.items()}, indent=2) + "\n"


def rendered(page: str, numbers: Mapping[str, Figures]) -> str:
    """Returns the page with the table of these figures between the markers."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n{table(numbers)}\n{END}{rest.partition(END)[2]}"


def table(numbers: Mapping[str, Figures]) -> str:
    """Returns a Markdown table."""
    head = ["process", *(item.name.replace("_", "-") for item in fields(Figures))]
    rows = [[name, *map(str, asdict(one).values())] for name, one in numbers.items()]
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] + ["--:"] * (len(head) - 1), *rows])
