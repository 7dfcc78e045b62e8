"""Builds the sdist and the wheels: `python -m infra.dist [--out dist] [--machine x86_64 --machine aarch64]`; `make dist`.

A wheel of a machine has the CPU backend compiled for every instruction set of that machine, so that a first start
compiles nothing. The C++ runtime is linked into the libraries; of the C library they need a version that the wheel's
platform tag states (`manylinux_2_34` needs glibc 2.34). Another machine's libraries need its compiler
(`aarch64-linux-gnu-g++`); a machine without one is left out with a notice, unless it was asked for.
"""

import argparse
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from antiphon.services.engine.backends.cpu.compile import VARIANTS, find_compiler, make_library

ROOT = Path(__file__).resolve().parents[2]
COMPILED = "antiphon/services/engine/backends/cpu/compiled"
MACHINES = ("x86_64", "aarch64")
LINK = ("-static-libstdc++", "-static-libgcc")
OLDEST = 17
"""Minor version of glibc of the oldest platform that such a tag can name."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Builds everything and prints the files. Returns 0, or 1 if a machine that was asked for has no compiler."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--machine", action="append", choices=MACHINES, help="default: all that have a compiler here")
    options = parser.parse_args(arguments)
    asked = options.machine or [machine for machine in MACHINES if compiler_of(machine)]
    if without := [machine for machine in asked if compiler_of(machine) is None]:
        sys.stderr.write(f"no C++ compiler for {', '.join(without)}\n")
        return 1
    shutil.rmtree(options.out, ignore_errors=True)
    run("hatchling", "build", "-d", str(options.out), "-t", "sdist", "-t", "wheel", cwd=ROOT)
    [plain] = options.out.glob("*-any.whl")
    for machine in asked:
        with tempfile.TemporaryDirectory(prefix="antiphon-dist-") as scratch:
            libraries = compiled(machine, Path(scratch) / "compiled")
            made = with_libraries(plain, libraries, platform_tag(libraries, machine), options.out)
        sys.stdout.write(f"{made.name}: {', '.join(path.name.partition('-')[0] for path in libraries)}\n")
    for machine in set(MACHINES) - {*asked}:
        sys.stdout.write(f"no wheel for {machine}: no compiler, or not asked for\n")
    # Whoever builds from the sdist gets the plain wheel; pip would otherwise offer it on machines with a better one.
    plain.unlink()
    return 0


def compiler_of(machine: str) -> str | None:
    """Returns the path of a compiler for a kind of machine; None if there is none here."""
    return find_compiler() if machine == platform.machine() else shutil.which(f"{machine}-linux-gnu-g++")


def compiled(machine: str, directory: Path) -> list[Path]:
    """Compiles the CPU backend for every instruction set of a kind of machine. Raises `CompileError`."""
    directory.mkdir()
    variants = [variant for variant in VARIANTS if variant.machine == machine]
    return [make_library(variant, directory, compiler_of(machine), LINK) for variant in variants]


def with_libraries(plain: Path, libraries: Sequence[Path], platform_name: str, out: Path) -> Path:
    """Writes a copy of the wheel `plain` with the libraries, for their platform, into `out`. Returns its path."""
    tag = f"py3-none-{platform_name}"
    with tempfile.TemporaryDirectory(prefix="antiphon-dist-") as scratch:
        run("wheel", "unpack", "--dest", scratch, str(plain))
        [folder] = Path(scratch).iterdir()
        (folder / COMPILED).mkdir()
        for library in libraries:
            shutil.copy(library, folder / COMPILED)
        [facts] = folder.glob("*.dist-info/WHEEL")
        text = facts.read_text().replace("Root-Is-Purelib: true", "Root-Is-Purelib: false")
        facts.write_text(re.sub(r"(?m)^Tag: .*$", f"Tag: {tag}", text))
        run("wheel", "pack", "--dest-dir", str(out), str(folder))
    [made] = out.glob(f"*-{tag}.whl")
    return made


def platform_tag(libraries: Iterable[Path], machine: str) -> str:
    """Returns the platform tag (PEP 600) of the newest glibc that a library asks for.

    Raises RuntimeError if a library needs the C++ runtime of the machine, which a tag does not promise.
    """
    newest = OLDEST
    for library in libraries:
        data = library.read_bytes()
        if b"libstdc++.so" in data:
            raise RuntimeError(f"{library.name} needs the machine's libstdc++")
        newest = max(newest, *(int(minor) for minor in re.findall(rb"GLIBC_2\.(\d+)", data)))
    return f"manylinux_2_{newest}_{machine}"


def run(module: str, *arguments: str, cwd: Path | None = None) -> None:
    """Runs a module of this interpreter; its output goes to standard error."""
    subprocess.run([sys.executable, "-m", module, *arguments], cwd=cwd, check=True, stdout=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
