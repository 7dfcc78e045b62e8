"""`make walk`: counts the files and functions that one plain streamed chat runs in a real server.

    python -m infra.walk [--list] [--json FILE] [--write]

Starts `antiphon serve` with the demo model on the CPU, records `IDLE_S` seconds without requests, and then `REQUESTS`
equal requests for four tokens, one after the other, after `WARM_UPS` that are not counted. `infra.walk.figures` says
what is counted.
"""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

from infra.walk import page
from infra.walk.figures import SHARE_MIN, Walk, figures, walks
from infra.walk.processes import TracedServer, traced_server

IDLE_S = 3.0
WARM_UPS, REQUESTS = 2, 20


def main() -> None:
    """Measures, and prints or writes the figures."""
    parser = argparse.ArgumentParser(prog="make walk", description="files and functions of a plain streamed chat")
    parser.add_argument(
        "--list", action="store_true", help="print all files and functions in the order of their visits"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    parser.add_argument("--write", action="store_true", help="write the figures to ARCHITECTURE.md and figures.json")
    options = parser.parse_args()
    with traced_server() as server:
        found = measured(server)
    numbers = figures(found)
    if options.list:
        print("\n".join(listed(found)))
    print(page.table(numbers))
    if options.json:
        options.json.write_text(page.as_json(numbers), encoding="utf-8")
    if options.write:
        page.write(numbers)


def measured(server: TracedServer, num_requests: int = REQUESTS, share_min: float = SHARE_MIN) -> dict[str, Walk]:
    """Returns the walk of each process of the server: what at least this share of the requests ran."""
    for _ in range(WARM_UPS):
        server.chat()
    idle = server.recorded(lambda: time.sleep(IDLE_S))
    return walks(idle, [server.recorded(server.chat) for _ in range(num_requests)], share_min)


def listed(found: dict[str, Walk]) -> Iterator[str]:
    """Yields lines: each process, its files in the order of their first visits, and below a file its functions."""
    for process, walk in found.items():
        yield f"{process}:"
        files: dict[str, list[str]] = {}
        for file, name in walk.functions:
            files.setdefault(file, []).append(name)
        for number, (file, names) in enumerate(files.items(), 1):
            yield f"{number:5} {file}"
            yield from (f"        {name}" for name in names)
        yield ""


if __name__ == "__main__":
    main()
