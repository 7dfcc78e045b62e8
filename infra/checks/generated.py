"""Files of the repository that are written by a program: they are written anew, or compared with what is there."""

import sys
from pathlib import Path


def keep(path: Path, text: str, command: str, *, check: bool) -> int:
    """Writes a file; with `check` only compares it, and tells if it is not the same. Returns the exit code.

    `command`: what writes it, for the message.
    """
    if not check:
        path.write_text(text, encoding="utf-8")
    elif not path.is_file() or path.read_text(encoding="utf-8") != text:
        print(f"{path} is out of date: run `{command}`", file=sys.stderr)
        return 1
    return 0
