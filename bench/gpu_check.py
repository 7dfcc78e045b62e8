"""`make gpu-check`: everything that needs a GPU, in one go: kernels right, kernels fast, engine, whole system, a peer.

    python -m bench.gpu_check [--models NAME …] [--work DIR] [--results DIR] [--wheels DIR] [--minutes 9.5]

Uses the interpreter that runs it, with its own torch and Triton. What that lacks of the project's other packages may
lie as wheels in a directory (`--wheels`): they are unpacked beside the work, and nothing is installed. Parts run one
after the other, each in a process with a time limit, the most telling first; what no time is left for is said to be
missing. Results are written after every part: `gpu-NAME.json` with hardware, versions and rooflines of the same run.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NEEDED = ("msgspec", "nats", "fastapi", "uvicorn", "prometheus_client", "pydantic", "opentelemetry.sdk", "tokenizers")
PACKAGES = ("torch", "triton", "numpy", "transformers", "nvidia-cublas")


@dataclass
class Check:
    """A run with its deadline and what it has found."""

    path: Path
    deadline: float
    environ: dict[str, str]
    results: dict[str, Any] = field(default_factory=dict)

    def part(self, name: str, module: str, *arguments: str, limit_s: float) -> Any:
        """Runs `python -m module`, whose last line is JSON; None if it failed or there was no time."""
        left = self.deadline - time.monotonic()
        if left < min(limit_s, 30):
            return self._note(name, {"missing": f"{left:.0f} s were left"}, None)
        print(f"--- {name} ({left:.0f} s left)", flush=True)
        started = time.monotonic()
        try:
            done = subprocess.run(
                [sys.executable, "-m", module, *arguments],
                cwd=ROOT, env=self.environ, capture_output=True, text=True, timeout=min(limit_s, left),
            )  # fmt: skip
        except subprocess.TimeoutExpired as late:
            return self._note(name, {"missing": f"took more than {late.timeout:.0f} s"}, None)
        if done.returncode:
            return self._note(name, {"failed": done.stderr[-3000:]}, None)
        found = json.loads(done.stdout.strip().splitlines()[-1])
        return self._note(name, {"took_s": round(time.monotonic() - started, 1), **found}, found)

    def _note(self, name: str, value: dict[str, Any], found: Any) -> Any:
        self.results[name] = value
        self.path.write_text(json.dumps(self.results, indent=1) + "\n", encoding="utf-8")
        print(json.dumps({name: value}, indent=1), flush=True)
        return found


def main() -> int:
    """The command: 0 if every part that ran was right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=["llama-3.1-8b", "qwen3-0.6b"])
    parser.add_argument(
        "--work", type=Path, default=None, help="where models are made (default: a temporary directory)"
    )
    parser.add_argument("--results", type=Path, default=ROOT / "bench" / "results")
    parser.add_argument("--wheels", type=Path, default=None)
    parser.add_argument("--minutes", type=float, default=9.5)
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
        return run(check, options.models, options.work or Path(scratch))


def run(check: Check, models: list[str], work: Path) -> int:
    """The parts, the most telling first."""
    roofs = check.part("rooflines", "bench.gpu.rooflines", limit_s=60)
    kernels = check.part("kernels", "bench.gpu.kernels", limit_s=200)
    if roofs is None or kernels is None or kernels["wrong"]:
        return 1
    rates = (f"--copy-tb-s={roofs['copy_tb_s']}", f"--gemm-tflop-s={roofs['gemm_tflop_s']}")
    made = {name: check.part(f"{name}: made", "bench.gpu.make", name, str(work), limit_s=150) for name in models}
    there = [name for name in models if made[name] is not None]
    for name in there:
        check.part(f"{name}: engine", "bench.gpu.engine", str(work / name), *rates, limit_s=150)
    for name in there:
        check.part(f"{name}: system, 1000/1000", "bench.gpu.system", str(work / name), limit_s=200)
    for name in there:
        check.part(f"{name}: transformers", "bench.gpu.peer", str(work / name), limit_s=90)
    return 1 if any("failed" in part for part in check.results.values()) else 0


def machine() -> dict[str, Any]:
    """What this run ran on."""
    smi = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    gpu = subprocess.run(smi, capture_output=True, text=True)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return {
        "gpu": gpu.stdout.strip(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "commit": commit.stdout.strip(),
        "date": time.strftime("%Y-%m-%d"),
    }


def device_name() -> str:
    """The GPU's name in a file's name."""
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("make gpu-check needs a CUDA device, and torch sees none here")
    return torch.cuda.get_device_name().lower().replace(" ", "-")


def with_wheels(options: argparse.Namespace) -> int:
    """The same run with the wheels' packages in sight."""
    with tempfile.TemporaryDirectory() as site:
        wheels = sorted(map(str, options.wheels.glob("*.whl")))
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target", site, *wheels]
        subprocess.run(pip, check=True)
        paths = os.pathsep.join(filter(None, (site, os.environ.get("PYTHONPATH"))))
        argv = [sys.executable, "-m", "bench.gpu_check", f"--minutes={options.minutes}", f"--results={options.results}"]
        argv += ["--models", *options.models] + ([f"--work={options.work}"] if options.work else [])
        return subprocess.run(argv, cwd=ROOT, env={**os.environ, "PYTHONPATH": paths}).returncode


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
