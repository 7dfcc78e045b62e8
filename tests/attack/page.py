"""The tables of a run: printed by `run`, and written into docs/contributing/attacks.md from its JSON.

    python -m tests.attack.page FILE

FILE is the report of `make attack ARGS="--json FILE"`.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[2] / "docs/contributing/attacks.md"
BEGIN, END = "<!-- results: written by `python -m tests.attack.page FILE` -->", "<!-- end of the results -->"
SHOWN_CHARS = 160
"""Of one reason why a goal was missed; the JSON has all of it."""
HEAD = ("attack", "by", "goal", "verdict", "tokens/s before → during", "p99, longest gap", "/livez", "largest process")


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """Returns the Markdown table of some results, in the form of `Result.as_json`."""
    lines = [f"| {' | '.join(HEAD)} |", f"|{'---|' * len(HEAD)}"]
    return "\n".join([*lines, *(f"| {' | '.join(map(_cell, _cells(one)))} |" for one in results)])


def _cells(one: Mapping[str, Any]) -> list[str]:
    verdict = one["verdict"]
    if one.get("misses"):
        verdict = f"**{verdict}**: {'; '.join(map(_short, one['misses']))}"
    elif one.get("skipped"):
        verdict = f"skipped: {one['skipped']}"
    rate = f"{one['calm_tokens_per_s']:.0f} → {one['tokens_per_s']:.0f}" if "tokens_per_s" in one else "–"
    gap = f"{one['p99_gap_s']:.2f}, {one['longest_gap_s']:.2f} s" if "p99_gap_s" in one else "–"
    livez = f"{one['livez_s']:.2f} s" if "livez_s" in one else "–"
    peak = f"{one['peak']}: {one['peak_mib']} MiB" if "peak_mib" in one else "–"
    return [f"`{one['name']}`: {one['what']}", one["attacker"], one["goal"], verdict, rate, gap, livez, peak]


def _short(text: str) -> str:
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}…"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def section(report: Mapping[str, Any]) -> str:
    """Returns what the page says of a report."""
    results = report["results"]
    counts = {verdict: sum(one["verdict"] == verdict for one in results) for verdict in ("held", "broken", "skipped")}
    head = (
        f"{report['date']}, version {report['version']}, {report['machine']}, seed {report['seed']}, limit of memory "
        f"by {report['memory_limit']}: {counts['held']} held, {counts['broken']} broken, {counts['skipped']} skipped."
    )
    return f"{head}\n\n{table(results)}"


def main() -> int:
    """Writes the page's section from the report that the command line names."""
    report = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    head, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(f"{head}{BEGIN}\n\n{section(report)}\n\n{END}{rest.partition(END)[2]}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
