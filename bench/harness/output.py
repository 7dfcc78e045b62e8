"""Writes what a benchmark has found, as JSON. Called by the benchmarks."""

import json
import sys
from pathlib import Path
from typing import Any


def print_and_save(found: dict[str, Any], file: Path | None) -> None:
    """Prints the figures, and writes them to a file if there is one."""
    sys.stdout.write(json.dumps(found, indent=1) + "\n")
    save(found, file)


def save(found: dict[str, Any], file: Path | None) -> None:
    """Writes the figures to a file if there is one."""
    if file is not None:
        file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
