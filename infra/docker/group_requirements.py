"""Prints the requirements of dependency groups of pyproject.toml, one a line: `group_requirements.py PYPROJECT GROUP…`.

Needed because pip before version 25.1 cannot install a dependency group. The group `project` means the dependencies of
the project itself.
"""

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


def main() -> None:
    """Prints the requirements of the groups named on the command line."""
    pyproject = tomllib.loads(Path(sys.argv[1]).read_text())
    for group in sys.argv[2:]:
        print("\n".join(requirements(pyproject, group)))


if __name__ == "__main__":
    main()
