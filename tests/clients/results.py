"""What each client did at its last run: `results.json`, from which docs/contributing/clients.md is written.

Rows of clients that a run leaves out stay as they are.
"""

import datetime
import functools
import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import msgspec

from antiphon.shared.version import __version__

FILE = Path(__file__).parent / "results.json"
_new: list["Row"] = []


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One client in one scenario."""

    client: str
    version: str
    api: str
    scenario: str
    passed: bool
    seconds: float
    calls_passed: int = 0
    """Checked calls of the client that succeeded; 0: not counted."""
    calls_answered: int = 0
    """Calls that the server refuses, as docs/reference/apis.md says."""
    calls_failed: tuple[str, ...] = ()
    requests: int = 0
    """Requests that the server got; 0: not counted."""
    moves: int = 0
    """Sequences that were continued on another engine."""
    prompt_tokens: int = 0
    """Of the longest prompt; 0: not counted."""
    ignored: tuple[str, ...] = ()
    """Fields of the requests that had no effect."""
    model: str = "antiphon-demo"
    day: str = msgspec.field(default_factory=lambda: datetime.datetime.now(datetime.UTC).date().isoformat())
    server: str = __version__

    @property
    def key(self) -> tuple[str, str]:
        return self.client, self.scenario


def folder() -> Path:
    """Where the clients' packages are installed."""
    return Path(os.environ["ANTIPHON_CLIENTS"])


@functools.cache
def npm_version(package: str) -> str:
    return json.loads((folder() / "node_modules" / package / "package.json").read_text())["version"]


@functools.cache
def pip_version(package: str) -> str:
    ask = f"from importlib.metadata import version; print(version({package!r}))"
    told = subprocess.run([str(folder() / "venv/bin/python"), "-c", ask], capture_output=True, text=True, check=True)
    return told.stdout.strip()


def add(row: Row) -> None:
    """Keeps a row of this run."""
    _new.append(row)


def new_rows() -> list[Row]:
    return list(_new)


def read() -> list[Row]:
    """Returns the rows of the file."""
    return msgspec.json.decode(FILE.read_bytes(), type=list[Row]) if FILE.exists() else []


def write(rows: Sequence[Row]) -> None:
    """Puts the rows in the place of older ones in the file."""
    kept = {row.key: row for row in [*read(), *rows]}
    ordered = [kept[key] for key in sorted(kept)]
    FILE.write_bytes(msgspec.json.format(msgspec.json.encode(ordered), indent=1) + b"\n")


def table(rows: Sequence[Row]) -> str:
    """Returns the rows as a table in Markdown."""
    lines = [
        "| client | version | API | what it did | calls | result | requests | moved | model | server | day |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    return "\n".join([*lines, *map(_line, rows)])


def _line(row: Row) -> str:
    outcome = "passed" if row.passed else "failed"
    counts = (str(one or "–") for one in (row.requests, row.moves))
    did = (row.client, row.version, row.api, row.scenario, _calls(row), outcome)
    return f"| {' | '.join((*did, *counts, row.model, row.server, row.day))} |"


def _calls(row: Row) -> str:
    counts = {"passed": row.calls_passed, "answered": row.calls_answered, "failed": len(row.calls_failed)}
    told = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    return ": ".join([told, *([", ".join(row.calls_failed)] if row.calls_failed else [])]) or "–"
