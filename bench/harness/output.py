"""Writes what a benchmark has found, as JSON with a line for each record. Called by the benchmarks."""

import json
import sys
from pathlib import Path
from typing import Any

WIDTH = 1000
"""Characters of a line: a record of one load with its samples."""


def print_and_save(found: dict[str, Any], file: Path | None) -> None:
    """Prints the figures, and writes them to a file if there is one."""
    sys.stdout.write(text_of(found) + "\n")
    save(found, file)


def save(found: Any, file: Path | None) -> None:
    """Writes the figures to a file if there is one."""
    if file is not None:
        file.write_text(text_of(found) + "\n", encoding="utf-8")


def text_of(value: Any, indent: str = "") -> str:
    """Returns JSON in which everything that fits is one line, and so is what holds no further objects."""
    line, inner = json.dumps(value), indent + " "
    parts: list[Any] = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    if len(line) <= WIDTH or not any(isinstance(part, dict | list) for part in parts):
        return line
    if isinstance(value, dict):
        lines = [f"{inner}{json.dumps(str(key))}: {text_of(part, inner)}" for key, part in value.items()]
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
    return "[\n" + ",\n".join(inner + text_of(part, inner) for part in parts) + f"\n{indent}]"
