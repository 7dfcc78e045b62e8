"""Creates rank tables: `python $LLM_TOOLS_PATH/PD_separate/pd_ranktable_tools.py --mode gen …`.

Equal to `antiphon ranktable`, under the name that scripts of other servers use.
"""

import importlib.util
import os
import sys
from pathlib import Path


def main() -> int:
    _find_release()
    from antiphon.cli import main as antiphon

    return antiphon(["ranktable", *sys.argv[1:]])


def _find_release() -> None:
    """Makes this file's release importable, and continues in the release's virtual environment if necessary."""
    parents = Path(__file__).resolve().parents
    root = next((path for path in parents if (path / "antiphon" / "cli.py").is_file()), None)
    if root is not None:
        sys.path.insert(0, str(root))
        python = root / ".venv" / "bin" / "python"
        if importlib.util.find_spec("msgspec") is None and python.exists():
            os.execv(python, [str(python), __file__, *sys.argv[1:]])
    if importlib.util.find_spec("antiphon") is None or importlib.util.find_spec("msgspec") is None:
        sys.exit("pd_ranktable_tools.py: this Python has no Antiphon: run the Python that it is installed in")


if __name__ == "__main__":
    sys.exit(main())
