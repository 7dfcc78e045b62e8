"""`make kernels`: compiles every kernel for every target and compares its cost with the recorded budget.

    python -m infra.checks.kernels.gate [--changed] [--write] [--only TEXT] [--jobs N]

`budgets.json` has one line for each case, kernel and target, with the limits for registers, bytes spilled and shared
memory. Exceeding a limit is an error. It is also an error if the compiled code lacks an instruction that makes the
kernel fast on a target: products of warp groups in Hopper's and Blackwell's prefill, matrix instructions on AMD; or if
decode attention on NVIDIA's GPUs does not copy the next keys while it computes. Each line also has a fingerprint of
everything that determines the compiled code. With `--changed`, which the tests use, only kernels whose fingerprint has
changed are compiled, and the cost of the others is read from `budgets.json`. `--write` rewrites the budgets and the
table in docs/contributing/kernels.md.
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
TABLE = ROOT / "docs" / "contributing" / "kernels.md"
FEW_ROWS = frozenset({"attention, Gemma 4 31B, cache e4m3"})
"""Cases whose prefill has too few rows for products of warp groups, because more would spill registers."""
WIDE = frozenset({"prefill", "expanded_prefill"})
"""Kernels that multiply many rows."""


@dataclass(frozen=True)
class Entry:
    """The result for one kernel of one case on one target."""

    case: str
    kernel: str
    target: str
    fingerprint: str
    cost: Cost

    @property
    def key(self) -> str:
        """The key of this entry's line in the budgets."""
        return f"{self.case} | {self.kernel} | {self.target}"


def main() -> int:
    """Runs the check from the command line. Returns 1 if there is a problem, else 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--changed", action="store_true", help="compile only what has another fingerprint")
    parser.add_argument("--write", action="store_true", help="make budgets and table anew")
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    processors = len(os.sched_getaffinity(0))
    parser.add_argument(
        "--jobs", type=int, default=processors, help="processes that compile (default: one for each processor)"
    )
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
    """Yields every kernel of the selected cases, on every target that supports the case, with its cost.

    `only` selects cases whose name contains it. `known` has the cost of fingerprints that need not be compiled.
    """
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
    """Returns the cost of each (case, number of the launch, target), compiled in `jobs` processes."""
    if jobs == 1:
        return [cost_of(*each) for each in work]
    with ProcessPoolExecutor(jobs) as pool:
        return list(pool.map(cost_of, *zip(*work, strict=True), chunksize=4)) if work else []


def cost_of(case_name: str, number: int, target_name: str) -> Cost:
    """Compiles one kernel in a worker process and returns its cost."""
    target = next(target for target in TARGETS if target.name == target_name)
    case = next(case for case in all_cases() if case.name == case_name)
    return compile_for(launches_of(case.start, target)[number], target)


def cost_in(line: Mapping[str, Any]) -> Cost:
    """Returns the cost that a line of the budgets records."""
    return Cost(**{name: line[name] for name in Cost.__dataclass_fields__})


def fingerprint(launch: Launch, target: Target) -> str:
    """Returns a hash of the kernel and all functions it calls, its specialisation, the target and Triton's version."""
    parts = (launch.kernel.cache_key, launch.key, target.name, triton.__version__)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def check(entries: Iterable[Entry], budgets: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yields a message for each kernel that exceeds its budget or its target's limits or lacks a needed instruction."""
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
        if entry.kernel.split()[1] in {"split", "latent_split"} and needs_buffers(entry) and cost.buffers < 2:
            yield f"{entry.key}: {cost.buffers} buffers, so no copy while it computes"
        needed = needed_instruction(entry)
        if needed and not cost.instructions.get(needed):
            yield f"{entry.key}: has no {needed}"


def needs_buffers(entry: Entry) -> bool:
    """Whether decode attention of this case must copy keys while it computes. In float32 wide heads fill the memory."""
    return entry.target != "gfx942" and entry.case not in {
        "attention, Gemma 4 31B, float32",
        "latent attention, DeepSeek V2-Lite, float32",
    }


def needed_instruction(entry: Entry) -> str:
    """Returns the instruction that the kernel must contain to be fast on its target; empty if none is required."""
    kernel = entry.kernel.split()[1]
    narrow = "float32" not in entry.case
    if entry.target == "sm_100":
        return "UTCHMMA" if kernel in WIDE and narrow and entry.case not in FEW_ROWS else ""
    if kernel == "quantized" and narrow and entry.target != "gfx942":
        return needed_of_quantized(entry)
    if (
        entry.target == "sm_90"
        and narrow
        and (kernel in WIDE or (kernel == "grouped" and "prefill" in entry.case) or has_many_pairs(entry))
        and entry.case not in FEW_ROWS
    ):
        return "HGMMA"
    if entry.target == "gfx942" and kernel in {
        "prefill",
        "split",
        "latent_prefill",
        "latent_split",
        "expanded_prefill",
        "grouped",
        "packed",
        "skinny",
        "shrink",
        "expand",
        "quantized",
    }:
        return "MFMA"
    over_latents = kernel in {"latent_prefill", "latent_split"}
    multiplies = over_latents or kernel in {
        "prefill",
        "expanded_prefill",
        "split",
        "grouped",
        "packed",
        "shrink",
        "expand",
    }
    few_rows = over_latents or (kernel == "prefill" and entry.case in FEW_ROWS)
    return "HMMA" if narrow and (multiplies if entry.target == "sm_80" else few_rows) else ""


def has_many_pairs(entry: Entry) -> bool:
    """Whether a kernel over latents has at least 64 pairs of a query and a head, and a cache of 16 bits."""
    few = "V2-Lite" in entry.case and entry.kernel.endswith("latent_split")
    return entry.kernel.split()[1] in {"latent_prefill", "latent_split"} and not few and "e4m3" not in entry.case


def needed_of_quantized(entry: Entry) -> str:
    """Returns the instruction of a product with quantized weights: on Hopper a warp-group one, except for few rows."""
    in_8_bits = "int8_dynamic" in entry.case
    # A separate launch quantizes the rows to 8 bits before the products.
    is_few = int(entry.kernel.split()[0]) == (2 if in_8_bits else 1)
    return ("I" if in_8_bits else "H") + ("GMMA" if entry.target == "sm_90" and not is_few else "MMA")


def table(entries: list[Entry]) -> str:
    """Returns the text of docs/contributing/kernels.md: the text of `page.md`, then the table of costs."""
    head = (ROOT / "infra" / "checks" / "kernels" / "page.md").read_text(encoding="utf-8").strip()
    lines = [
        head,
        "",
        "| case | kernel | " + " | ".join(target.name for target in TARGETS) + " |",
        "|---|" + "---|" * (len(TARGETS) + 1),
    ]
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for entry in entries:
        rows.setdefault((entry.case, entry.kernel), {})[entry.target] = brief(entry.cost)
    for (case, kernel), cells in rows.items():
        lines.append(f"| {case} | {kernel} | " + " | ".join(cells.get(target.name, "–") for target in TARGETS) + " |")
    return "\n".join(lines) + "\n"


def brief(cost: Cost) -> str:
    """Returns a cell of the table: registers, shared memory, matrix instructions, buffers, and spilled bytes if any."""
    products = [
        f"{count} {name}" for name, count in cost.instructions.items() if name.endswith(("MMA", "FMA")) and count
    ]
    buffers = [f"{cost.buffers} buffers"] if cost.buffers > 1 else []
    spills = [f"spills {cost.spills}"] if cost.spills else []
    return ", ".join([str(cost.registers), f"{-(-cost.shared // 1024)} K", *products, *buffers, *spills])


if __name__ == "__main__":
    # Under Triton's interpreter kernels cannot be compiled.
    if os.environ.pop("TRITON_INTERPRET", "0") not in ("", "0"):
        sys.exit("unset TRITON_INTERPRET: under the interpreter there is nothing to compile")
    sys.exit(main())
