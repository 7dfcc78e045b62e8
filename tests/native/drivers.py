"""Builds a test's C++ program with the backend's sources, once for each state of them."""

import hashlib
import subprocess
import tempfile
from pathlib import Path

from antiphon.services.engine.backends.cpu.compile import QUIET, SOURCE, compile_objects, run
from antiphon.services.engine.backends.cpu.library import cache_directory
from antiphon.shared.cache_dirs import make_directory, remove_oldest

DRIVER = Path(__file__).parent / "driver.cpp"
COMMON = ("-std=c++17", "-Wall", "-Wextra", "-Werror", "-pthread", "-I", str(SOURCE), *QUIET)
HEAP = ("-DWRAP_MEMORY", "-Wl,--wrap=mmap,--wrap=munmap,--wrap=madvise")
"""The library's memory comes from the heap, where a sanitizer sees its ends."""
KEPT_MAX = 4
"""Programs of each name that are kept: other checkouts have other sources."""


def kept() -> Path:
    """A directory that outlives runs and checkouts, beside that of the libraries that engines compile."""
    cache = cache_directory("")
    assert cache is not None
    return cache.with_name("drivers")


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
    make_directory(directory)
    with tempfile.TemporaryDirectory(dir=directory, prefix=".") as scratch:
        every, made = (*COMMON, *flags), Path(scratch) / "program"
        run([compiler, *every, *compile_objects(compiler, every, sources, Path(scratch)), "-o", str(made)])
        made.replace(program)
    remove_oldest(directory, f"{name}-*", KEPT_MAX)
    return program


def numbers(command: list[str]) -> dict[str, list[float]]:
    """What the driver prints: a few logits for each model. Fails with what it complains of."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    assert not done.stderr
    lines = (line.rpartition(":") for line in done.stdout.splitlines())
    return {name: [float(word) for word in words.split()] for name, _, words in lines}
