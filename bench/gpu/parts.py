"""How `make gpu-check` and the processes that compute its parts talk to each other.

    python -m bench.gpu.MODULE PART … [--results FILE] [--tiny]

Such a process computes its parts in order and prints a line for each, `MARK` and a JSON object: its name and what was
found. A part that fails ends the process after its line, because the device may be unusable then. `--results`: the file
with the results of earlier parts. `--tiny`: the smallest shapes, also on a CPU, where kernels need Triton's interpreter
(`TRITON_INTERPRET=1`); only whether the parts run is then of interest.
"""

import argparse
import json
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

MARK = "@part "
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ERROR_CHARS = 3000

Found = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Given:
    """What a part is given. `earlier`: the results of parts before it, by name."""

    tiny: bool = False
    earlier: dict[str, Any] = field(default_factory=dict)

    @property
    def on_device(self) -> bool:
        """Whether the device is a GPU."""
        return DEVICE.type == "cuda"


Parts = Mapping[str, Callable[[Given], Found]]


def synchronize() -> None:
    """Waits for the device, if it is a GPU."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def compute_parts(parts: Parts) -> None:
    """Computes the parts that the command line names, see the module. Exits with 1 if one failed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="+", choices=parts)
    parser.add_argument("--results", type=Path, default=None)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    earlier = {} if options.results is None else json.loads(options.results.read_text(encoding="utf-8"))
    given = Given(options.tiny, earlier)
    for name in options.names:
        torch.manual_seed(0)
        try:
            found = parts[name](given)
        except Exception:  # whatever a part raises is its result
            say(name, {"failed": traceback.format_exc()[-ERROR_CHARS:]})
            sys.exit(1)
        given.earlier[name] = found
        say(name, found)


def say(name: str, found: Mapping[str, Any]) -> None:
    """Prints the line of a part, on a line of its own whatever libraries have printed before."""
    print("\n" + MARK + json.dumps({"part": name, "found": found}), flush=True)


def said(line: str) -> tuple[str, Found] | None:
    """Returns the name of the part and what was found, from a printed line; None for any other line."""
    if not line.startswith(MARK):
        return None
    told = json.loads(line.removeprefix(MARK))
    return told["part"], told["found"]
