"""Prints the requirements of dependency groups of pyproject.toml, one a line: `group_requirements.py PYPROJECT GROUP…`.

Needed because pip before version 25.1 cannot install a dependency group. The group `project` means the dependencies of
the project itself. With `--hashes=FILE` (first; the file that make_hashes.sh writes) it prints exact versions with
their hashes, of what the requirements need too, as pip demands with --require-hashes; torch, of which the file has
none, is left out.
"""

import re
import sys
import tomllib
from pathlib import Path
from typing import Any


def requirements(pyproject: dict[str, Any], group: str) -> list[str]:
    """Returns a group's requirements, including those of included groups. Raises KeyError for an unknown group."""
    if group == "project":
        return list(pyproject["project"]["dependencies"])
    found: list[str] = []
    for item in pyproject["dependency-groups"][group]:
        found += requirements(pyproject, item["include-group"]) if isinstance(item, dict) else [item]
    return list(dict.fromkeys(found))


def name_of(requirement: str) -> str:
    """Returns the normalised name of the package that a requirement is about."""
    return re.split(r"[<>=~!;\[ ]", requirement)[0].lower().replace("_", "-")


def with_hashes(wanted: list[str], hashes: str) -> str:
    """Returns the entries of the hash file that these requirements need, directly or through each other.

    The comments of an entry name the packages that need it. Raises SystemExit if a requirement has no entry.
    """
    entries = {name_of(entry): entry for entry in re.split(r"^(?=\w)", hashes, flags=re.MULTILINE) if entry}
    chosen = {name_of(requirement) for requirement in wanted} - {"torch"}
    if missing := chosen - entries.keys():
        raise SystemExit(f"no hashes of {', '.join(sorted(missing))}: run infra/docker/make_hashes.sh")
    needed_by = {
        name: set(re.findall(r"^ *# +(?:via )?([\w.-]+)$", entry, re.MULTILINE)) for name, entry in entries.items()
    }
    while more := {name for name, needing in needed_by.items() if needing & chosen} - chosen:
        chosen |= more
    return "".join(entries[name] for name in entries if name in chosen)


def main() -> None:
    """Prints the requirements of the groups named on the command line."""
    words = sys.argv[1:]
    hashes = Path(words.pop(0).removeprefix("--hashes=")) if words[0].startswith("--hashes=") else None
    pyproject = tomllib.loads(Path(words[0]).read_text())
    found = [line for group in words[1:] for line in requirements(pyproject, group)]
    print("\n".join(found) if hashes is None else with_hashes(found, hashes.read_text()))


if __name__ == "__main__":
    main()
