"""Makes a release: `python -m infra.dist.release 1.2.3`; `make release VERSION=1.2.3`.

The part [Unreleased] of CHANGELOG.md becomes that of the version, `shared/version.py` states it, and both are committed
and tagged `v1.2.3`. Nothing is pushed: `git push origin main v1.2.3` starts the workflow that builds and publishes.
`--notes VERSION` prints the part of a version and changes nothing.
"""

import argparse
import datetime
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

LINES_MAX = 60
"""Longest part of the changelog: what users read before they decide to upgrade."""
_VERSION = re.compile(r"\d+\.\d+\.\d+")
_UNRELEASED = "## [Unreleased]\n"


class ReleaseError(Exception):
    """Why there is no release; for whoever runs the command."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command in the current directory, the top of the repository. Returns its exit code."""
    parser = argparse.ArgumentParser(description="Makes a release.")
    parser.add_argument("version")
    parser.add_argument("--notes", action="store_true", help="only print what the changelog says of it")
    options = parser.parse_args(arguments)
    changelog = Path("CHANGELOG.md")
    try:
        if options.notes:
            sys.stdout.write(part_of(changelog.read_text(), options.version))
            return 0
        release(options.version, changelog, Path("shared/version.py"))
    except ReleaseError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"tagged v{options.version}; to publish: git push origin HEAD v{options.version}\n")
    return 0


def release(version: str, changelog: Path, module: Path) -> None:
    """Changes both files, commits and tags. Raises ReleaseError, before anything is changed."""
    if not _VERSION.fullmatch(version):
        raise ReleaseError(f"{version} is no version: three numbers are, such as 0.2.0")
    if _git("status", "--porcelain"):
        raise ReleaseError("there are changes that are not committed: commit them first")
    if _git("tag", "--list", f"v{version}"):
        raise ReleaseError(f"there is a tag v{version} already")
    text = changelog.read_text()
    changes = part_of(text, "Unreleased")
    if not changes.strip():
        raise ReleaseError("CHANGELOG.md says nothing under [Unreleased]")
    if changes.count("\n") > LINES_MAX:
        raise ReleaseError(f"[Unreleased] in CHANGELOG.md has {changes.count(chr(10))} lines, more than {LINES_MAX}")
    today = datetime.datetime.now(datetime.UTC).date()
    changelog.write_text(text.replace(_UNRELEASED, f"{_UNRELEASED}\n## [{version}] - {today}\n", 1))
    module.write_text(re.sub(r'__version__ = ".*"', f'__version__ = "{version}"', module.read_text()))
    _git("commit", "--quiet", "--all", "--message", f"release {version}")
    _git("tag", "--annotate", f"v{version}", "--message", changes.strip())


def part_of(changelog: str, version: str) -> str:
    """Returns what the changelog says of a version, without its heading. Raises ReleaseError."""
    found = re.search(rf"^## \[{re.escape(version)}\].*\n((?:(?!## \[).*\n?)*)", changelog, re.MULTILINE)
    if found is None:
        raise ReleaseError(f"CHANGELOG.md has no part [{version}]")
    return found[1].strip("\n") + "\n"


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
