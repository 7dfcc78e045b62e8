"""The blocks of code of a page, and what is said about them. Reads pages only; runs nothing."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs"
PAGES = [
    DOCS / "index.md",
    DOCS / "reference" / "command-line.md",
    *(path for folder in ("start", "guides", "integrations") for path in sorted((DOCS / folder).glob("*.md"))),
]
"""The pages for users, whose blocks have to run."""
_BLOCK = re.compile(r"(?:^<!-- not run: (?P<mark>[^\n]+) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S)
_ASSIGNED = re.compile(r"[A-Z_]+=.*")


@dataclass(frozen=True, kw_only=True)
class Block:
    """One block. `mark`: why it is not run, from the comment before it; empty if it is."""

    page: Path
    line: int
    language: str
    text: str
    mark: str

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def server(self) -> tuple[str, ...]:
        """The flags of the server that a block starts, which is all that it does; empty if it does something else."""
        words = shlex.split(self.text.replace("\\\n", " "), comments=True) if self.language == "sh" else []
        return tuple(words[2:]) or ("",) if words[:2] == ["antiphon", "serve"] else ()


def blocks_of(page: Path) -> list[Block]:
    """Returns the blocks of a page in their order."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            page=page,
            line=text.count("\n", 0, found.start("text")),
            language=found["language"],
            text=found["text"],
            mark=found["mark"] or "",
        )
        for found in _BLOCK.finditer(text)
    ]


def commands(text: str) -> list[list[str]]:
    """Returns the commands of a block of shell code as words, without their assignments of variables."""
    joined = text.replace("\\\n", " ")
    found: list[list[str]] = []
    for words in _lines(joined):
        while words and _ASSIGNED.fullmatch(words[0]):
            words = words[1:]
        found += [words] if words else []
    return found


def _lines(text: str) -> list[list[str]]:
    """Splits at the ends of lines that are not within quotation marks."""
    found: list[list[str]] = []
    pending = ""
    for line in text.splitlines():
        pending += line + "\n"
        try:
            words = shlex.split(pending, comments=True)
        except ValueError:
            continue
        found.append(words)
        pending = ""
    assert not pending.strip(), f"a quotation mark is open: {pending!r}"
    return found
