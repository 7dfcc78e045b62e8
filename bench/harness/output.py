"""Writes what a benchmark has found, as JSON. Called by the benchmarks that print nothing else."""

import json
import sys
from pathlib import Path
from typing import Any


def print_and_save(found: dict[str, Any], file: Path | None) -> None:
    """Prints the figures, and writes them to a file if there is one."""
    text = json.dumps(found, indent=1) + "\n"
    sys.stdout.write(text)
    if file is not None:
        file.write_text(text, encoding="utf-8")
