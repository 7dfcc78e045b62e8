"""Prints the requirements of dependency groups of pyproject.toml, one a line: `group_requirements.py PYPROJECT GROUP…`.

For plain pip before 25.1, which cannot install a group. `project` stands for the project's own dependencies.
"""

import sys
import tomllib
from pathlib import Path
from typing import Any


def requirements(pyproject: dict[str, Any], group: str) -> list[str]:
    """A group's requirements, included groups first. Raises KeyError for an unknown group."""
    if group == "project":
        return list(pyproject["project"]["dependencies"])
    found: list[str] = []
    for item in pyproject["dependency-groups"][group]:
        found += requirements(pyproject, item["include-group"]) if isinstance(item, dict) else [item]
    return list(dict.fromkeys(found))


def main() -> None:
    """The command."""
    pyproject = tomllib.loads(Path(sys.argv[1]).read_text())
    for group in sys.argv[2:]:
        print("\n".join(requirements(pyproject, group)))


if __name__ == "__main__":
    main()
