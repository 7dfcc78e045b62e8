"""The command that runs a module of this package in a process of its own.

Only safe places are searched for modules (`-P`): otherwise a folder `antiphon` in the directory in which a user starts
a server would take the place of the installed one, and code of a stranger's checkout would run.
"""

import sys
from pathlib import Path

_ROOT = str(Path(__file__).absolute().parents[3])
"""The directory that has the package `antiphon`; through the link `antiphon/shared` in a checkout."""


def python_command(module: str, *arguments: str) -> list[str]:
    """Returns the words of a command that runs `module` with this interpreter.

    The current directory is searched only where this process found the package there and nowhere else, as in a checkout
    that is not installed.
    """
    is_elsewhere = sys.flags.safe_path or _ROOT in sys.path[1:]
    return [sys.executable, *(["-P"] if is_elsewhere else []), "-m", module, *arguments]
