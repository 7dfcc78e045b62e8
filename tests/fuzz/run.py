"""`make schemathesis`: requests drawn from `/openapi.json` against a real server; no 5xx, errors in their API's form.

    python -m tests.fuzz.run [--examples 40] [--cases 5000] [--seed N] [--json FILE]

Starts `antiphon serve` with the demo model. Schemathesis, which the target installs in `build/schemathesis`, sends
each operation's corner cases and `--examples` random requests, valid and invalid. The exit code is 1 if a check fails,
if a process of the server has ended, or if there were fewer than `--cases` requests.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.system.served import ROOT, Served, fetch, until_the_end

SCHEMATHESIS = ROOT / "build" / "schemathesis" / "bin" / "schemathesis"
CHECKS = ("not_a_server_error", "content_type_conformance", "response_schema_conformance", "error_body")
LEFT_OUT = "/admin/engines/{engine_id}/drain"
"""It takes the only engine out of service, after which every request is a 503."""


def main() -> int:
    """Runs the tool against a server, prints what it found, and writes the numbers to a file if asked to."""
    options = parse()
    started = time.monotonic()
    with until_the_end(Served("--max-model-len=256", "--threads=1")) as served:
        pids = set(served.descendants())
        code, output, counts = fuzzed(served, options)
        ended = sorted(pids - set(served.descendants()))
        healthy = fetch(served, "GET", "/health").status == 200
    sys.stdout.write(output)
    results: dict[str, Any] = {
        "requests": sum(counts.values()),
        "by_status": counts,
        "server_errors": sum(count for status, count in counts.items() if status.startswith("5")),
        "failed_checks": code != 0,
        "processes_that_ended": len(ended),
        "healthy_at_the_end": healthy,
        "checks": list(CHECKS),
        "seconds": round(time.monotonic() - started),
    }
    text = json.dumps(results, indent=1) + "\n"
    sys.stdout.write(text)
    if options.json is not None:
        options.json.write_text(text, encoding="utf-8")
    return int(code != 0 or bool(ended) or not healthy or results["requests"] < options.cases)


def parse() -> argparse.Namespace:
    """Parses the command-line options."""
    parser = argparse.ArgumentParser(description="Requests drawn from the served OpenAPI document.")
    parser.add_argument("--examples", type=int, default=40, help="random requests for each operation")
    parser.add_argument("--cases", type=int, default=5000, help="requests that there must be at least")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="file for the numbers")
    return parser.parse_args()


def fuzzed(served: Served, options: argparse.Namespace) -> tuple[int, str, dict[str, int]]:
    """Returns the exit code of the tool, what it printed, and the number of answers by their status."""
    url = f"http://127.0.0.1:{served.port}"
    with tempfile.TemporaryDirectory() as directory:
        counts = Path(directory) / "counts.json"
        done = subprocess.run(
            [
                *(str(SCHEMATHESIS), "run", f"{url}/openapi.json", f"--url={url}", f"--checks={','.join(CHECKS)}"),
                # One worker: with several, the tool's own use of Python's parser is not safe among threads.
                *("--workers=1", "--request-timeout=60", "--continue-on-failure", "--phases=coverage,fuzzing"),
                *("--suppress-health-check=all", "--no-color", f"--seed={options.seed}", "--warnings=off"),
                *(f"--max-examples={options.examples}", f"--exclude-path={LEFT_OUT}", "--generation-database=none"),
            ],
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "SCHEMATHESIS_HOOKS": "tests.fuzz.hooks",
                "ANTIPHON_FUZZ_COUNTS": str(counts),
            },
            cwd=directory,
            capture_output=True,
            text=True,
            check=False,
        )
        found: dict[str, int] = json.loads(counts.read_text()) if counts.is_file() else {}
        return done.returncode, done.stdout + done.stderr, found


if __name__ == "__main__":
    sys.exit(main())
