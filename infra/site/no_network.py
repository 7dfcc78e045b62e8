"""Checks that a built site loads nothing from other hosts: `python infra/site/no_network.py build/site`.

Links that a reader may follow (`<a>`) are no resources. Uses nothing but the standard library.
"""

import re
import sys
from html.parser import HTMLParser
from pathlib import Path

_TAGS = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}
_LOADED = {"stylesheet", "icon", "preload", "preconnect", "dns-prefetch", "manifest", "modulepreload"}
_IMPORTED = re.compile(r"@import[^;]*//|url\(\s*['\"]?(?:https?:)?//")


class _Resources(HTMLParser):
    """Collects the addresses on other hosts from which a page loads something."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        address = given.get(_TAGS.get(tag, "")) or ""
        loads = tag != "link" or _LOADED & set((given.get("rel") or "").split())
        if loads and address.startswith(("http:", "https:", "//")):
            self.found.append(f"<{tag}> {address}")


def resources(site: Path) -> dict[str, list[str]]:
    """Returns what pages and styles of a site load from other hosts, by file."""
    found: dict[str, list[str]] = {}
    for path in sorted(site.rglob("*.html")):
        page = _Resources()
        page.feed(path.read_text(encoding="utf-8"))
        if page.found:
            found[path.relative_to(site).as_posix()] = page.found
    for path in sorted(site.rglob("*.css")):
        if outside := _IMPORTED.findall(path.read_text(encoding="utf-8")):
            found[path.relative_to(site).as_posix()] = outside
    return found


def main() -> int:
    """Prints what is loaded from elsewhere. Returns the exit code."""
    site = Path(sys.argv[1])
    found = resources(site)
    for file, addresses in found.items():
        print(f"{file} loads {', '.join(addresses)}", file=sys.stderr)
    if not found:
        print(f"{sum(1 for _ in site.rglob('*.html'))} pages in {site}, which load nothing from other hosts")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
