"""The documents: facts have their rows, links lead somewhere, and each page is in the site's navigation."""

import re
from pathlib import Path

import pytest

from infra.checks.spec_coverage import read_rows
from infra.site.hooks import TAKEN, rewritten
from infra.site.no_network import resources

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs"
COMPATIBILITY = DOCS / "contributing" / "compatibility.md"
README = ROOT / "README.md"
GUIDES = ("ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md")
MADE = ("infra/nats/secrets/passwords.conf",)
"""Files that a user makes with a script."""
PAGES = [README, *sorted(DOCS.rglob("*.md"))]
FOR_USERS = ("start", "guides", "integrations")
JARGON = re.compile(r"S-[A-Z]{3}-\d{3}|\bNPUs?\b|\bADR \d|\b352\b|specification")
"""What means nothing to a reader who only uses the server."""


def test_every_fact_about_other_machines_and_versions_has_its_line() -> None:
    lines = COMPATIBILITY.read_text(encoding="utf-8").splitlines()
    rows = ("S-DEP-010", "S-DEP-050", "S-DEP-051", "S-DEP-052", "S-DIS-050", *(f"S-DIS-05{n}" for n in range(3, 7)))
    assert [row for row in rows if sum(line.startswith(f"| {row} |") for line in lines) != 1] == []
    documented = {row.id for row in read_rows(ROOT).values() if row.reason == "docs/contributing/compatibility.md"}
    assert documented <= set(rows)


def test_the_readme_can_be_read_in_a_minute() -> None:
    lines = README.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 60
    assert {"make serve", "make test"} <= {line.partition("  ")[0] for line in lines}


def test_every_page_is_in_the_navigation_once() -> None:
    nav = re.findall(r"^ +- (?:.+: )?([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    decisions = set(DOCS.glob("adr/0*.md"))
    pages = {path.relative_to(DOCS).as_posix() for path in {*DOCS.rglob("*.md")} - decisions}
    assert sorted(nav) == sorted({*pages, *TAKEN.values()})


def test_the_list_of_decisions_has_each_with_its_status() -> None:
    page = (DOCS / "adr" / "README.md").read_text(encoding="utf-8")
    listed = dict(
        re.findall(r"^\| \[\d+\]\((\S+)\) \| .+ \| (accepted|not shipped|replaced .+) \|$", page, re.MULTILINE)
    )
    assert {*listed} == {path.name for path in DOCS.glob("adr/0*.md")}


@pytest.mark.parametrize(
    "page", [DOCS / "index.md", *(p for f in FOR_USERS for p in sorted((DOCS / f).glob("*.md")))], ids=str
)
def test_a_page_for_users_has_short_lines_and_no_words_of_the_project(page: Path) -> None:
    prose = [line for line in _prose(page).splitlines() if not line.startswith("|")]
    assert [line for line in prose if len(line) > 160] == []
    assert JARGON.findall("\n".join(prose)) == []


def test_the_site_has_links_between_pages_and_texts_in_place_of_links_to_files() -> None:
    text = (
        "[a](../../SECURITY.md#x) [b](../adr) [c](../../examples/chat.py) [d](https://example.org) [e](#f) [g](chat.md)"
    )
    assert rewritten(text, "guides/tools.md") == (
        "[a](../contributing/security.md#x) [b](../adr/README.md) c [d](https://example.org) [e](#f) [g](chat.md)"
    )
    assert rewritten("[a](docs/guides/chat.md)", TAKEN["CHANGELOG.md"]) == "[a](../guides/chat.md)"


def test_what_a_site_loads_from_other_hosts_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<link rel="canonical" href="https://x"><link rel="stylesheet" href="//y/s.css"><a href="https://z">z</a>'
        '<script src="https://w/j.js"></script><img src="own.png">'
    )
    (tmp_path / "b.css").write_text("@import url(https://v/f.css);")
    found = resources(tmp_path)
    assert found["a.html"] == ["<link> //y/s.css", "<script> https://w/j.js"]
    assert list(found) == ["a.html", "b.css"]


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
