"""`make bench`: every figure in one table, with the machine's own limits measured in the same run.

`--results FILE` also writes them as JSON. Two shared cores are noisy: figures are medians and ratios; see
docs/performance.md for the ones that were kept.
"""

import argparse
import json
import platform
import sys
import time
from pathlib import Path

from bench import bus_tax, cold_start
from bench.serving import Serving


def machine() -> dict[str, object]:
    """What ran this."""
    model = next((line.partition(":")[2].strip() for line in _cpuinfo() if line.startswith("model name")), "")
    return {
        "cpu": model,
        "cores": len([1 for line in _cpuinfo() if line.startswith("processor")]),
        "python": platform.python_version(),
    }


def memory() -> dict[str, int]:
    """Resident MiB of each process, idle, demo model."""
    with Serving() as serving:
        return {name: round(value) for name, value in sorted(serving.memory_mb().items())}


def table(results: dict[str, object]) -> str:
    """The results as lines of text."""
    lines = []
    for section, values in results.items():
        lines.append(section)
        rows = values.items() if isinstance(values, dict) else [("", values)]
        lines += [f"  {name:24} {value}" for name, value in rows]
    return "\n".join(lines)


def main() -> int:
    """Runs everything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="", help="also measure the bus tax with this model directory")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--results", type=Path, default=None)
    options = parser.parse_args()
    results: dict[str, object] = {"machine": {**machine(), "date": time.strftime("%Y-%m-%d")}}
    results["cold start, demo model"] = cold_start.measure(3)
    results["memory, MiB"] = memory()
    results["bus tax, demo model"] = bus_tax.measure(bus_tax.parse(["--pairs", str(options.pairs)]))
    if options.model:
        flags = ["--model", options.model, "--pairs", str(options.pairs)]
        results[f"bus tax, {Path(options.model).name}"] = bus_tax.measure(bus_tax.parse(flags))
    print(table(results))
    if options.results:
        options.results.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0


def _cpuinfo() -> list[str]:
    return Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()


if __name__ == "__main__":
    sys.exit(main())
