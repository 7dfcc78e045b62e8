"""Compiles the C++ in `source/` for a processor, once, and finds what has been compiled.

A library is named by its variant and a hash of sources and flags: whatever changes makes another one. Libraries that an
image or an installation has made beforehand lie beside the sources, others in the user's cache. Where there is no
compiler, there is no library, and the caller goes on without. Called by the CPU worker and, ahead of it, by `__main__`.
"""

import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).parent / "source"
BESIDE = Path(__file__).parent / "compiled"
"""Libraries that were made beforehand."""
COMPILERS = ("g++", "clang++")
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-pthread", "-Wall", "-Wextra")
QUIET = ("-Wno-psabi", "-Wno-uninitialized", "-Wno-maybe-uninitialized")
"""The compiler's own headers of vector instructions are not free of these."""
COMPILE_TIMEOUT_S = 300.0


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
    has = processor_flags(Path("/proc/cpuinfo").read_text() if cpuinfo is None else cpuinfo)
    return [variant for variant in VARIANTS if variant.machine == machine and variant.needs <= has]


def processor_flags(cpuinfo: str) -> frozenset[str]:
    """The flags of the first processor that is described."""
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def find_library(variant: Variant, cache: Path) -> Path | None:
    """The compiled library of a variant, where there is one."""
    for directory in (BESIDE, cache):
        path = directory / library_name(variant)
        if path.is_file() and (directory == BESIDE or _is_ours(path)):
            return path
    return None


def make_library(variant: Variant, directory: Path) -> Path:
    """Compiles a variant into a directory. Raises `CompileError`."""
    compiler = next((path for name in COMPILERS if (path := shutil.which(name))), None)
    if compiler is None:
        raise CompileError("there is no C++ compiler (Debian has one in the package g++)")
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = directory / library_name(variant)
    with tempfile.TemporaryDirectory(dir=directory, prefix=".compiling-") as scratch:
        compile_objects(compiler, (*FLAGS, *QUIET, *variant.flags), Path(scratch), Path(scratch) / path.name)
        (Path(scratch) / path.name).replace(path)
    return path


def compile_objects(compiler: str, flags: tuple[str, ...], scratch: Path, library: Path) -> None:
    """Compiles every source, several at a time, and links them. Raises `CompileError`."""
    sources = sorted(SOURCE.glob("*.cpp"))
    objects = [scratch / f"{source.stem}.o" for source in sources]
    with ThreadPoolExecutor(max_workers=max(1, len(os.sched_getaffinity(0)))) as pool:
        commands = [
            [compiler, *flags, "-c", str(source), "-o", str(to)] for source, to in zip(sources, objects, strict=True)
        ]
        list(pool.map(_run, commands))
    _run([compiler, *flags, "-shared", *map(str, objects), "-o", str(library)])


def library_name(variant: Variant) -> str:
    """`variant-hash.so`."""
    digest = hashlib.sha256(repr((FLAGS, variant.flags)).encode())
    for path in sorted(SOURCE.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return f"{variant.name}-{digest.hexdigest()[:16]}.so"


def cache_directory(asked: str) -> Path:
    """Where libraries are kept: as asked, or the user's cache."""
    return Path(asked).expanduser() if asked else Path("~/.cache/antiphon/cpu").expanduser()


def _is_ours(path: Path) -> bool:
    """Code that another user could have put there is not loaded."""
    return path.stat().st_uid in (os.getuid(), 0)


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompileError(f"{command[0]} could not run: {error}") from error
    if done.returncode:
        raise CompileError(f"{command[0]} failed: {done.stderr.strip()[-2000:]}")
