"""Compiles the C++ sources in `source/` for an instruction set.

A library is named after its variant and a hash of sources and flags, so any change results in another file. `library`
decides where and when a library is compiled, `__main__` compiles in advance; both call this module.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from antiphon.shared.cache_dirs import alone_in, make_directory, remove_oldest
from antiphon.shared.limits import COMPILED_LIBRARIES_MAX

SOURCE = Path(__file__).parent / "source"
COMPILERS = ("g++", "clang++")
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-pthread", "-Wall", "-Wextra")
QUIET = ("-Wno-psabi", "-Wno-uninitialized", "-Wno-maybe-uninitialized")
"""Warnings that the compiler's own headers of vector instructions cause."""
COMPILE_TIMEOUT_S = 300.0
_CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True, slots=True)
class Variant:
    """An instruction set to compile for, and the flags in `/proc/cpuinfo` of a processor that has it."""

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
"""Ordered by preference, the best variant first."""


class CompileError(RuntimeError):
    """No library was found and none could be compiled; the message says why."""


def usable_variants(machine: str | None = None, cpuinfo: str | None = None) -> list[Variant]:
    """Returns the variants that this processor can run, the best first."""
    machine = platform.machine() if machine is None else machine
    if cpuinfo is None:
        cpuinfo = _CPUINFO.read_text() if _CPUINFO.is_file() else ""
    has = processor_flags(cpuinfo)
    return [variant for variant in VARIANTS if variant.machine == machine and variant.needs <= has]


def processor_flags(cpuinfo: str) -> frozenset[str]:
    """Returns the flags of the first processor that `cpuinfo` describes."""
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def make_library(variant: Variant, directory: Path, compiler: str | None = None, link: Sequence[str] = ()) -> Path:
    """Compiles a variant into a directory unless it is there already, and returns its path. Raises `CompileError`.

    `compiler`: its path, by default that of this machine; `link`: more flags for linking.
    """
    path = directory / library_name(variant)
    if path.is_file():
        return path
    compiler = compiler or find_compiler()
    if compiler is None:
        raise CompileError("there is no C++ compiler (Debian has one in the package g++)")
    try:
        make_directory(directory)
        with alone_in(directory, ".compiling-*"):
            # Another process may have compiled it while this one waited for the lock.
            if not path.is_file():
                _compile(compiler, variant, path, link)
                remove_oldest(directory, "*.so", COMPILED_LIBRARIES_MAX)
    except OSError as error:
        raise CompileError(f"{directory} cannot be written: {error}") from error
    return path


def find_compiler() -> str | None:
    """Returns the path of a C++ compiler; None if there is none."""
    return next((path for name in COMPILERS if (path := shutil.which(name))), None)


def compile_objects(compiler: str, flags: Iterable[str], sources: Iterable[Path], scratch: Path) -> list[str]:
    """Compiles the sources in parallel and returns the paths of the objects. Raises `CompileError`."""
    pairs = [(str(source), str(scratch / f"{source.stem}.o")) for source in sources]
    with ThreadPoolExecutor(max_workers=max(1, len(os.sched_getaffinity(0)))) as pool:
        list(pool.map(run, ([compiler, *flags, "-c", source, "-o", to] for source, to in pairs)))
    return [to for _, to in pairs]


def run(command: list[str]) -> None:
    """Runs a compiler. Raises `CompileError` with the compiler's output if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=COMPILE_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompileError(f"{command[0]} could not run: {error}") from error
    if done.returncode:
        raise CompileError(f"{command[0]} failed: {done.stderr.strip()[-2000:]}")


def library_name(variant: Variant) -> str:
    """Returns the file name of a variant's library, `variant-hash.so`."""
    digest = hashlib.sha256(repr((FLAGS, variant.flags)).encode())
    for path in sorted(SOURCE.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return f"{variant.name}-{digest.hexdigest()[:16]}.so"


def _compile(compiler: str, variant: Variant, path: Path, link: Sequence[str]) -> None:
    """Compiles in a temporary directory and renames the library into place, so that it is always complete."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".compiling-", ignore_cleanup_errors=True) as scratch:
        flags, made = (*FLAGS, *QUIET, *variant.flags), Path(scratch) / path.name
        objects = compile_objects(compiler, flags, sorted(SOURCE.glob("*.cpp")), Path(scratch))
        run([compiler, *flags, "-shared", *link, *objects, "-o", str(made)])
        made.chmod(0o755)
        with made.open("rb") as file:
            os.fsync(file.fileno())
        made.replace(path)
