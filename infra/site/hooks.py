"""Hooks of mkdocs: documents outside docs/ become pages of the site, and links to other files of the repository texts.

Loaded by mkdocs from mkdocs.yml, not imported by anything else.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TAKEN = {
    "ARCHITECTURE.md": "contributing/architecture.md",
    "CONTRIBUTING.md": "contributing/guide.md",
    "SECURITY.md": "contributing/security.md",
    "CHANGELOG.md": "contributing/changelog.md",
}
"""Documents of the repository's root, and what their pages are called."""
_SOURCES = {page: name for name, page in TAKEN.items()}
_LINK = re.compile(r"(?<!!)\[([^\]\[]+)\]\(([^)\s]+)\)")


def on_files(files: Any, config: Any) -> Any:
    """Adds the documents of the root."""
    from mkdocs.structure.files import File

    for name, page in TAKEN.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turns links that leave docs/ into links between pages, or into plain text."""
    return rewritten(markdown, page.file.src_uri)


def rewritten(markdown: str, page: str) -> str:
    """Returns a page's text with links as the site has them. `page`: its path below docs/."""
    source = _SOURCES.get(page, f"docs/{page}")

    def link(match: re.Match[str]) -> str:
        text, target = match[1], match[2]
        path, mark, anchor = target.partition("#")
        if "://" in target or target.startswith("mailto:") or not path:
            return match[0]
        found = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        if found in ("docs/adr", "docs/adr/"):
            found = "docs/adr/README.md"
        inside = TAKEN.get(found, found.removeprefix("docs/"))
        if inside == found or not inside.endswith(".md"):
            return text
        return f"[{text}]({posixpath.relpath(inside, posixpath.dirname(page) or '.')}{mark}{anchor})"

    return _LINK.sub(link, markdown)
