"""Tests that run on a CPU in `make test`, here on the GPU, and tiny launches of all kernels under compute-sanitizer.

kernel tests    the kernels, which run under Triton's interpreter in `make test`, compiled
worker tests    whole workers; when the time is over, those that have run count
sanitizer       memcheck and racecheck: reads and writes outside of tensors, and races between the threads of a
program, which only a device can have
"""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType

from bench.gpu.parts import Found, Given, compute_parts

ROOT = Path(__file__).resolve().parents[2]
_OF_WORKERS = (
    "triton_worker", "triton_adapters", "lookahead", "latent_attention", "adapters", "beams", "own_cache", "parity",
    "images", "pooling", "prompt_adapters", "prompt_logprobs", "text_parts", "transformers_model", "whole_text",
)  # fmt: skip
TESTS = {
    "kernels": ("tests/unit/engine/backends/triton",),
    "workers": (
        *(f"tests/model/test_{name}.py" for name in _OF_WORKERS),
        *(f"tests/quantized/test_{name}.py" for name in ("fp8", "checkpoints", "mxfp4", "bitsandbytes")),
    ),
    "tiny": ("tests/unit/engine/backends/triton/test_routing.py",),
}
NOT_HERE = "not native and not compiled_backend and not refuse and not cpu"
"""Expression for pytest's `-k`. The tests of the C++ code, and of what is refused on a CPU, need no GPU."""
_TOOLS = ("memcheck", "racecheck")
_LAUNCHES = ("errors of attention", "errors of products", "errors of experts", "errors of other kernels")
_ERRORS = re.compile(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard")
_SHOWN_CHARS = 3000


def tests(kind: str, given: Given) -> Found:
    """Returns the numbers of tests that passed and failed, and the names of those that failed.

    On SIGTERM pytest ends, and the tests that have run are reported.
    """
    # Other versions of libraries than the pinned ones may warn, which is an error in this suite.
    options = ["-q", "-W", "default", "-p", "no:cacheprovider", "--tb=short", "-k", NOT_HERE]
    paths, workers = (TESTS["tiny"], ["-n", "0"]) if given.tiny else (TESTS[kind], ["-n", "12"])
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", *options, *workers, *paths],
        cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "0" if given.on_device else "1"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    asked: list[int] = []

    def end(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        process.send_signal(signal.SIGINT)

    before = signal.signal(signal.SIGTERM, end)
    try:
        output, _ = process.communicate()
    finally:
        signal.signal(signal.SIGTERM, before)
    print(output, flush=True)
    found = counted(output)
    if asked:
        found["missing"] = "the tests that had not run when the time was over"
    elif "passed" not in found:
        found["wrong"] = [*found["wrong"], f"pytest ended with {process.returncode}"]
    return found


def counted(output: str) -> Found:
    """Returns what the output of pytest says."""
    lines = output.splitlines() or [""]
    numbers = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|error)", lines[-1])}
    return {**numbers, "wrong": [line for line in lines if line.startswith(("FAILED", "ERROR"))]}


def sanitizer(given: Given) -> Found:
    """Returns the number of errors that each tool reports, and what it says about them."""
    program = find_sanitizer()
    if program is None:
        return {"missing": "compute-sanitizer is not on this machine"}
    found: Found = {}
    for tool in _TOOLS:
        command = [program, f"--tool={tool}", sys.executable, "-m", "bench.gpu.kernels", "--tiny", *_LAUNCHES]
        # PyTorch's allocator hides accesses beyond a tensor within one of its blocks.
        environ = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        done = subprocess.run(
            command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        found[tool] = reported(done.stdout, done.returncode)
    return {**found, "wrong": [name for name, each in found.items() if each["errors"] != 0]}


def reported(output: str, code: int) -> Found:
    """Returns the number of errors in the output of a tool, and its end if there are any; None: no summary."""
    numbers = [int(number) for pair in _ERRORS.findall(output) for number in pair if number]
    errors = sum(numbers) if numbers else None
    return {"errors": errors, "exit": code, **({"said": output[-_SHOWN_CHARS:]} if errors != 0 or code else {})}


def find_sanitizer() -> str | None:
    """Returns the path of compute-sanitizer: on the PATH or in a CUDA toolkit; None if there is none."""
    places = [Path("/usr/local"), Path("/opt")]
    toolkits = [path for place in places for path in sorted(place.glob("cuda*/**/compute-sanitizer")) if path.is_file()]
    return shutil.which("compute-sanitizer") or next(map(str, toolkits), None)


PARTS = {
    "kernel tests": lambda given: tests("kernels", given),
    "sanitizer": sanitizer,
    "worker tests": lambda given: tests("workers", given),
}

if __name__ == "__main__":
    compute_parts(PARTS)
