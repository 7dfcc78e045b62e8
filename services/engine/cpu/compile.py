"""Compiles the C++ in `source/` for a processor.

A library is named by its variant and a hash of sources and flags: whatever changes makes another one. Where and when
one is made is the business of `library`, and ahead of time of `__main__`, which call this.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from services.engine.cpu.places import alone_in, make_directory, remove_oldest
from shared.limits import COMPILED_LIBRARIES_MAX

SOURCE = Path(__file__).parent / "source"
COMPILERS = ("g++", "clang++")
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-pthread", "-Wall", "-Wextra")
QUIET = ("-Wno-psabi", "-Wno-uninitialized", "-Wno-maybe-uninitialized")
"""The compiler's own headers of vector instructions are not free of these."""
COMPILE_TIMEOUT_S = 300.0
_CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True, slots=True)
class Variant:
    """Instructions to compile for, and what `/proc/cpuinfo` says of a processor that has them."""

    name: str
    machine: str
    flags: tuple[str, ...]
    needs: frozenset[str]


_AVX512 = ("-march=x86-64-v4", "-mprefer-vector-width=512")
_V4 = frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx2", "fma", "f16c", "bmi2"})
VARIANTS = (
    Variant(
        "amx",
        "x86_64",
        (*_AVX512, "-mavx512bf16", "-mavx512vnni", "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
        _V4 | {"avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16", "amx_int8"},
    ),
    Variant(
        "avx512bf16",
        "x86_64",
        (*_AVX512, "-mavx512bf16", "-mavx512vnni"),
        _V4 | {"avx512_bf16", "avx512_vnni"},
    ),
    Variant("avx512", "x86_64", _AVX512, _V4),
    Variant("avx2", "x86_64", ("-march=x86-64-v3",), frozenset({"avx2", "fma", "f16c", "bmi2"})),
    Variant("neon", "aarch64", ("-march=armv8-a",), frozenset()),
)
"""The best first."""


class CompileError(RuntimeError):
    """There is no library and none could be made; the message says why."""


def usable_variants(machine: str | None = None, cpuinfo: str | None = None) -> list[Variant]:
    """The variants that this processor runs, the best first."""
    machine = platform.machine() if machine is None else machine
    if cpuinfo is None:
        cpuinfo = _CPUINFO.read_text() if _CPUINFO.is_file() else ""
    has = processor_flags(cpuinfo)
    return [variant for variant in VARIANTS if variant.machine == machine and variant.needs <= has]


def processor_flags(cpuinfo: str) -> frozenset[str]:
    """The flags of the first processor that is described."""
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def make_library(variant: Variant, directory: Path) -> Path:
    """Compiles a variant into a directory, unless it is there. Raises `CompileError`."""
    path = directory / library_name(variant)
    if path.is_file():
        return path
    compiler = find_compiler()
    if compiler is None:
        raise CompileError("there is no C++ compiler (Debian has one in the package g++)")
    try:
        make_directory(directory)
        with alone_in(directory, ".compiling-*"):
            # Somebody else may have made it meanwhile.
            if not path.is_file():
                _compile(compiler, variant, path)
                remove_oldest(directory, "*.so", COMPILED_LIBRARIES_MAX)
    except OSError as error:
        raise CompileError(f"{directory} cannot be written: {error}") from error
    return path


def find_compiler() -> str | None:
    """The path of a C++ compiler."""
    return next((path for name in COMPILERS if (path := shutil.which(name))), None)


def compile_objects(compiler: str, flags: Iterable[str], sources: Iterable[Path], scratch: Path) -> list[str]:
    """Compiles the sources, several at a time, and gives the objects' paths. Raises `CompileError`."""
    pairs = [(str(source), str(scratch / f"{source.stem}.o")) for source in sources]
    with ThreadPoolExecutor(max_workers=max(1, len(os.sched_getaffinity(0)))) as pool:
        list(pool.map(run, ([compiler, *flags, "-c", source, "-o", to] for source, to in pairs)))
    return [to for _, to in pairs]


def run(command: list[str]) -> None:
    """Runs a compiler. Raises `CompileError` with what it said."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=COMPILE_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompileError(f"{command[0]} could not run: {error}") from error
    if done.returncode:
        raise CompileError(f"{command[0]} failed: {done.stderr.strip()[-2000:]}")


def library_name(variant: Variant) -> str:
    """`variant-hash.so`."""
    digest = hashlib.sha256(repr((FLAGS, variant.flags)).encode())
    for path in sorted(SOURCE.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return f"{variant.name}-{digest.hexdigest()[:16]}.so"


def _compile(compiler: str, variant: Variant, path: Path) -> None:
    """The library appears whole or not at all."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".compiling-", ignore_cleanup_errors=True) as scratch:
        flags, made = (*FLAGS, *QUIET, *variant.flags), Path(scratch) / path.name
        objects = compile_objects(compiler, flags, sorted(SOURCE.glob("*.cpp")), Path(scratch))
        run([compiler, *flags, "-shared", *objects, "-o", str(made)])
        made.chmod(0o755)
        with made.open("rb") as file:
            os.fsync(file.fileno())
        made.replace(path)
