"""Documents that state facts which no test can show: they name their rows, and their links lead somewhere."""

import re
from pathlib import Path

import pytest

from infra.checks.spec_coverage import read_rows

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs"
COMPATIBILITY = DOCS / "reference" / "compatibility.md"
README = ROOT / "README.md"
GUIDES = ("ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md")
MADE = ("infra/nats/secrets/passwords.conf",)
"""Files that a user makes with a script."""
PAGES = [README, *sorted(DOCS.glob("*.md")), *sorted(DOCS.glob("performance/*.md"))]


def test_every_fact_about_other_machines_and_versions_has_its_line() -> None:
    lines = COMPATIBILITY.read_text(encoding="utf-8").splitlines()
    rows = ("S-DEP-010", "S-DEP-050", "S-DEP-051", "S-DEP-052", "S-DIS-050", *(f"S-DIS-05{n}" for n in range(3, 7)))
    assert [row for row in rows if sum(line.startswith(f"| {row} |") for line in lines) != 1] == []
    documented = {row.id for row in read_rows(ROOT).values() if row.reason == "docs/reference/compatibility.md"}
    assert documented <= set(rows)


def test_the_readme_can_be_read_in_a_minute() -> None:
    lines = README.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 60
    assert {"make serve", "make test"} <= {line.partition("  ")[0] for line in lines}


def test_every_page_is_in_the_list_of_features() -> None:
    listed = re.findall(r"\]\(([\w-]+\.md)\)", (DOCS / "features.md").read_text(encoding="utf-8"))
    assert {page.name for page in DOCS.glob("*.md")} - {*listed, "features.md"} == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_link_leads_to_a_heading_or_a_file(page: Path) -> None:
    links = [link.partition("#") for link in re.findall(r"\]\(([^)\s]+)\)", _prose(page)) if "://" not in link]
    found = [(page.parent / name if name else page, anchor) for name, _, anchor in links]
    assert [path for path, _ in found if not path.exists()] == []
    assert [(path, anchor) for path, anchor in found if anchor and anchor not in _anchors(path)] == []


@pytest.mark.parametrize("page", [*PAGES, *map(ROOT.joinpath, GUIDES)], ids=lambda page: page.name)
def test_a_path_of_this_repository_is_there(page: Path) -> None:
    paths = re.findall(r"`((?:services|shared|antiphon|infra|tests|bench)/[\w./-]+)`", page.read_text(encoding="utf-8"))
    assert [path for path in paths if not (ROOT / path).exists() and path not in MADE] == []


def _anchors(page: Path) -> set[str]:
    """Returns the anchors of a page's headings, as GitHub names them."""
    headings = re.findall(r"^#+ (.+)$", _prose(page), re.MULTILINE)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in plain}


def _prose(page: Path) -> str:
    """Returns a page's text without its blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
