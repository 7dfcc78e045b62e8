"""`make kernels`: compiles every kernel for every target and compares what it takes with the budgets that were agreed.

    python -m infra.checks.kernels.gate [--changed] [--write] [--only TEXT] [--jobs N]

A budget is a line of `budgets.json` for each kernel, case and target: registers, bytes spilled, shared memory. More of
any is an error, and so is a target's missing instruction: warp-group products in Hopper's prefill, matrix instructions
on AMD. Each line also has a fingerprint of everything that decides the code: with `--changed`, as the tests call it,
only kernels with another one are compiled, and the line says what the others take. `--write` makes the budgets and the
table docs/kernels.md anew.
"""

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton

from infra.checks.kernels.cases import all_cases
from infra.checks.kernels.compiling import TARGETS, Cost, Launch, Target, compile_for, launches_of

ROOT = Path(__file__).resolve().parents[3]
BUDGETS = Path(__file__).with_name("budgets.json")
TABLE = ROOT / "docs" / "kernels.md"


@dataclass(frozen=True)
class Entry:
    """One kernel of one case on one target."""

    case: str
    kernel: str
    target: str
    fingerprint: str
    cost: Cost

    @property
    def key(self) -> str:
        """Its line in the budgets."""
        return f"{self.case} | {self.kernel} | {self.target}"


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--changed", action="store_true", help="compile only what has another fingerprint")
    parser.add_argument("--write", action="store_true", help="make budgets and table anew")
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile")
    options = parser.parse_args()
    budgets: dict[str, dict[str, Any]] = json.loads(BUDGETS.read_text(encoding="utf-8")) if BUDGETS.exists() else {}
    known = {line["fingerprint"]: cost_in(line) for line in budgets.values()} if options.changed else {}
    entries = list(compiled(options.only, options.jobs, known))
    if options.write:
        budgets = {entry.key: {"fingerprint": entry.fingerprint, **asdict(entry.cost)} for entry in entries}
        lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(line)}" for key, line in budgets.items())
        BUDGETS.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
        TABLE.write_text(table(entries), encoding="utf-8")
    problems = list(check(entries, budgets))
    for problem in problems:
        print(f"error: {problem}")
    num_known = sum(entry.fingerprint in known for entry in entries)
    print(
        f"{len(entries) - num_known} kernels compiled with Triton {triton.__version__}, {num_known} unchanged, "
        f"{len(problems)} problems"
    )
    return 1 if problems else 0


def compiled(only: str, jobs: int, known: Mapping[str, Cost]) -> Iterator[Entry]:
    """Every kernel of the chosen cases on every target that has it; those with a known fingerprint are not compiled."""
    found: list[tuple[tuple[str, str, str], str]] = []
    work: dict[str, tuple[str, int, str]] = {}
    for case in all_cases():
        for target in TARGETS:
            if only in case.name and target.name not in case.left_out:
                for number, launch in enumerate(launches_of(case.start, target)):
                    print_of_it = fingerprint(launch, target)
                    found.append(((case.name, f"{number + 1} {launch.name}", target.name), print_of_it))
                    if print_of_it not in known:
                        work[print_of_it] = case.name, number, target.name
    costs = {**known, **dict(zip(work, compile_all(list(work.values()), jobs), strict=True))}
    for names, print_of_it in found:
        yield Entry(*names, print_of_it, costs[print_of_it])


def compile_all(work: list[tuple[str, int, str]], jobs: int) -> list[Cost]:
    """What each (case, number of the launch, target) takes."""
    if jobs == 1:
        return [cost_of(*each) for each in work]
    with ProcessPoolExecutor(jobs) as pool:
        return list(pool.map(cost_of, *zip(*work, strict=True), chunksize=4)) if work else []


def cost_of(case_name: str, number: int, target_name: str) -> Cost:
    """Of one kernel, really compiled."""
    target = next(target for target in TARGETS if target.name == target_name)
    case = next(case for case in all_cases() if case.name == case_name)
    return compile_for(launches_of(case.start, target)[number], target)


def cost_in(line: Mapping[str, Any]) -> Cost:
    """What a line of the budgets says."""
    return Cost(**{name: line[name] for name in Cost.__dataclass_fields__})


def fingerprint(launch: Launch, target: Target) -> str:
    """Of the kernel with all that it calls, its specialisation, the target and the compiler."""
    parts = (launch.kernel.cache_key, launch.key, target.name, triton.__version__)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def check(entries: Iterable[Entry], budgets: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """What is over its budget, beyond the target, or lacks the instructions that it is made for."""
    limits = {target.name: target.shared_max for target in TARGETS}
    for entry in entries:
        cost, budget = entry.cost, budgets.get(entry.key)
        if budget is None:
            yield f"{entry.key}: has no budget: make kernels ARGS=--write"
            continue
        for name in ("registers", "spills", "shared"):
            if getattr(cost, name) > budget[name]:
                yield f"{entry.key}: {name} {getattr(cost, name)}, more than {budget[name]}"
        if cost.shared > limits[entry.target]:
            yield f"{entry.key}: {cost.shared} bytes of shared memory, and the target has {limits[entry.target]}"
        if entry.target == "sm_90" and cost.spills:
            yield f"{entry.key}: {cost.spills} bytes of registers spilled"
        needed = needed_instruction(entry)
        if needed and not cost.instructions.get(needed):
            yield f"{entry.key}: has no {needed}"


def needed_instruction(entry: Entry) -> str:
    """What makes a kernel fast on its target; empty: nothing special."""
    kernel = entry.kernel.split()[1]
    narrow = "float32" not in entry.case
    if (
        entry.target == "sm_90"
        and narrow
        and (kernel == "prefill" or (kernel == "grouped" and "prefill" in entry.case))
    ):
        return "HGMMA"
    if entry.target == "gfx942" and kernel in {"prefill", "split", "grouped", "skinny"}:
        return "MFMA"
    return "HMMA" if entry.target == "sm_80" and narrow and kernel in {"prefill", "split", "grouped"} else ""


def table(entries: list[Entry]) -> str:
    """The page docs/kernels.md."""
    head = (ROOT / "infra" / "checks" / "kernels" / "page.md").read_text(encoding="utf-8").strip()
    lines = [
        head,
        "",
        "| case | kernel | " + " | ".join(target.name for target in TARGETS) + " |",
        "|---|---|---|---|---|",
    ]
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for entry in entries:
        rows.setdefault((entry.case, entry.kernel), {})[entry.target] = brief(entry.cost)
    for (case, kernel), cells in rows.items():
        lines.append(f"| {case} | {kernel} | " + " | ".join(cells.get(target.name, "–") for target in TARGETS) + " |")
    return "\n".join(lines) + "\n"


def brief(cost: Cost) -> str:
    """Registers, shared memory, products, and spills where there are some."""
    products = [
        f"{count} {name}" for name, count in cost.instructions.items() if name.endswith(("MMA", "FMA")) and count
    ]
    spills = [f"spills {cost.spills}"] if cost.spills else []
    return ", ".join([str(cost.registers), f"{-(-cost.shared // 1024)} K", *products, *spills])


if __name__ == "__main__":
    # An interpreted kernel cannot be compiled.
    if os.environ.pop("TRITON_INTERPRET", "0") not in ("", "0"):
        sys.exit("unset TRITON_INTERPRET: under the interpreter there is nothing to compile")
    sys.exit(main())
