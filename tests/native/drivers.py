"""Builds a test's C++ program with the backend's sources, once for each state of them; the directory outlives a run."""

import hashlib
import shutil
import subprocess
from pathlib import Path

from services.engine.backends.cpu.compile import QUIET, SOURCE, compile_objects, run

DRIVER = Path(__file__).parent / "driver.cpp"
COMMON = ("-std=c++17", "-Wall", "-Wextra", "-Werror", "-pthread", "-I", str(SOURCE), *QUIET)
HEAP = ("-DWRAP_MEMORY", "-Wl,--wrap=mmap,--wrap=munmap,--wrap=madvise")
"""The library's memory comes from the heap, where a sanitizer sees its ends."""


def build(
    directory: Path, name: str, compiler: str, *flags: str, driver: Path = DRIVER, parts: tuple[str, ...] = ("*.cpp",)
) -> Path:
    """The program's path. `parts`: which of the backend's sources it needs. Raises `CompileError`."""
    digest = hashlib.sha256(repr((compiler, flags, COMMON)).encode())
    sources = [driver, *(path for part in parts for path in sorted(SOURCE.glob(part)))]
    for path in (driver, DRIVER.with_name("heap.h"), *sorted(SOURCE.iterdir())):
        digest.update(path.read_bytes())
    program = directory / f"{name}-{digest.hexdigest()[:16]}"
    if program.is_file():
        return program
    for old in directory.glob(f"{name}-*"):
        old.unlink() if old.is_file() else shutil.rmtree(old)
    scratch = directory / f"{name}-objects"
    scratch.mkdir(parents=True)
    every = (*COMMON, *flags)
    objects = compile_objects(compiler, every, sources, scratch)
    run([compiler, *every, *objects, "-o", str(program)])
    shutil.rmtree(scratch)
    return program


def numbers(command: list[str]) -> dict[str, list[float]]:
    """What the driver prints: a few logits for each model. Fails with what it complains of."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    assert not done.stderr
    lines = (line.rpartition(":") for line in done.stdout.splitlines())
    return {name: [float(word) for word in words.split()] for name, _, words in lines}
