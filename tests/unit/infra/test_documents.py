"""Documents that state facts which no test can show: they name their rows, and their links lead somewhere."""

import re
from pathlib import Path

import pytest

from infra.checks.spec_coverage import read_rows

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs"
COMPATIBILITY = DOCS / "compatibility.md"


def test_every_fact_about_other_machines_and_versions_has_its_line() -> None:
    lines = COMPATIBILITY.read_text(encoding="utf-8").splitlines()
    rows = ("S-DEP-010", "S-DEP-050", "S-DEP-051", "S-DEP-052", "S-DIS-050", *(f"S-DIS-05{n}" for n in range(3, 7)))
    assert [row for row in rows if sum(line.startswith(f"| {row} |") for line in lines) != 1] == []
    documented = {row.id for row in read_rows(ROOT).values() if row.reason == "docs/compatibility.md"}
    assert documented <= set(rows)


@pytest.mark.parametrize("name", ["compatibility.md", "containers.md", "conversation-templates.md"])
def test_a_link_leads_to_a_page(name: str) -> None:
    links = re.findall(r"\]\(([^)#]+)\)", (DOCS / name).read_text(encoding="utf-8"))
    assert [link for link in links if not (DOCS / link).exists()] == []
