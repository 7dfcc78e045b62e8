"""Finding and compiling libraries, with the real compiler and a source of a few lines in place of the backend's."""

import logging
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from antiphon.services.engine.backends.cpu import __main__ as command
from antiphon.services.engine.backends.cpu import compile as compiling
from antiphon.services.engine.backends.cpu import library as finding
from antiphon.services.engine.backends.cpu.compile import (
    CompileError,
    Variant,
    library_name,
    make_library,
    usable_variants,
)
from antiphon.services.engine.backends.cpu.library import cache_directory, describe, find_library, load_library
from antiphon.services.engine.backends.cpu.native import _SIGNATURES  # pyright: ignore[reportPrivateUsage]
from antiphon.shared.cache_dirs import is_private
from antiphon.shared.limits import COMPILED_LIBRARIES_MAX

REAL = compiling.find_compiler()
needs_compiler = pytest.mark.skipif(REAL is None, reason="needs a C++ compiler: g++ or clang++")
BETTER = Variant("better", "any", ("-DBETTER",), frozenset({"shiny"}))
PLAIN = Variant("plain", "any", (), frozenset())
FLAGS_OF_A_SERVER = (
    "avx2 fma f16c bmi2 avx512f avx512bw avx512cd avx512dq avx512vl avx512_bf16 avx512_vnni amx_tile amx_bf16 amx_int8"
)


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sources that compile in a moment, two variants, and nothing made beforehand; gives a directory to work in."""
    source = tmp_path / "source"
    source.mkdir()
    functions = "".join(f"int {name}() {{ return 1; }}\n" for name in _SIGNATURES)
    (source / "all.cpp").write_text(f'extern "C" {{\n{functions}}}\n')
    monkeypatch.setattr(compiling, "SOURCE", source)
    monkeypatch.setattr(finding, "BESIDE", tmp_path / "beside")
    monkeypatch.setattr(command, "BESIDE", tmp_path / "beside")
    monkeypatch.setattr(finding, "usable_variants", lambda: [BETTER, PLAIN])
    return tmp_path


def use_compiler(directory: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> Path:
    """Puts a script in the compiler's place; what it was called with is in the file that is given back."""
    calls, bin_directory = directory / "calls", directory / "bin"
    bin_directory.mkdir()
    calls.touch()
    (bin_directory / "g++").write_text(f'#!/bin/sh\necho "$@" >>{calls}\n{script}\n')
    (bin_directory / "g++").chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin_directory}:/usr/bin:/bin")
    return calls


def without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")


@pytest.mark.parametrize(
    ("machine", "flags", "names"),
    [
        ("x86_64", FLAGS_OF_A_SERVER, ["amx", "avx512bf16", "avx512", "avx2"]),
        ("x86_64", FLAGS_OF_A_SERVER.replace("amx_int8", ""), ["avx512bf16", "avx512", "avx2"]),
        ("x86_64", "avx2 fma f16c bmi2 sse4_2", ["avx2"]),
        ("x86_64", "avx2 f16c bmi2", []),
        ("aarch64", "fp asimd", ["neon"]),
        ("arm64", "", []),
        ("riscv64", "", []),
    ],
)
def test_a_processor_gets_the_instructions_that_it_has_the_best_first(
    machine: str, flags: str, names: list[str]
) -> None:
    cpuinfo = f"processor\t: 0\nflags\t\t: {flags}\n\nprocessor\t: 1\nflags\t\t: other\n"
    assert [variant.name for variant in usable_variants(machine, cpuinfo)] == names


@needs_compiler
def test_a_library_is_compiled_once_and_then_found_without_a_compiler(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tiny / "some" / "cache"
    assert load_library(str(cache)).usable()
    assert stat.S_IMODE(cache.stat().st_mode) == stat.S_IMODE(cache.parent.stat().st_mode) == 0o700
    assert [path.name for path in cache.glob("*.so")] == [library_name(BETTER)]
    without_compiler(monkeypatch)
    assert load_library(str(cache)).usable()
    assert describe(str(cache)) == (True, "better, compiled")


def test_other_flags_and_other_sources_make_other_libraries(tiny: Path) -> None:
    names = {library_name(variant) for variant in (PLAIN, Variant("plain", "any", ("-O0",), frozenset()))}
    with (tiny / "source" / "all.cpp").open("a") as file:
        file.write("// more\n")
    assert len(names | {library_name(PLAIN)}) == 3


@needs_compiler
@pytest.mark.parametrize("what", ["file", "directory", "above"])
def test_code_that_somebody_else_could_have_put_there_is_not_loaded(tiny: Path, what: str) -> None:
    cache = tiny / "above" / "cache"
    path = make_library(PLAIN, cache)
    assert find_library(PLAIN, cache) == path
    opened = {"file": path, "directory": cache, "above": cache.parent}[what]
    opened.chmod(0o777)
    assert find_library(PLAIN, cache) is None
    if what != "file":
        before = path.stat().st_mtime_ns
        assert load_library(str(cache)).usable()
        assert path.stat().st_mtime_ns == before
        assert not list(cache.glob(library_name(BETTER))), "compiled where others can write"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_what_belongs_to_somebody_else_is_not_private(tmp_path: Path) -> None:
    (path := tmp_path / "library.so").touch(0o700)
    assert is_private(path)
    os.chown(path, 4242, 4242)
    assert not is_private(path)


def test_above_a_private_directory_others_may_write_where_they_cannot_replace_it(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir(0o700)
    tmp_path.chmod(0o1777)
    assert is_private(tmp_path / "mine")
    assert not is_private(tmp_path)
    tmp_path.chmod(0o777)
    assert not is_private(tmp_path / "mine")


@needs_compiler
@pytest.mark.parametrize("home", ["a file in the way", "none"])
def test_without_a_place_to_keep_it_a_library_is_made_for_one_start(
    home: str, tiny: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tiny / "file").touch()
    if home == "none":
        monkeypatch.setattr(finding, "cache_directory", lambda asked: None)
    monkeypatch.setattr("tempfile.tempdir", str(tiny))
    before = set(tiny.iterdir())
    with caplog.at_level(logging.INFO):
        assert load_library(str(tiny / "file" / "cache")).usable()
    assert "cannot keep it for the next start" in caplog.text
    assert set(tiny.iterdir()) == before


def test_a_user_without_a_home_has_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", fail)
    assert cache_directory("") is None


@needs_compiler
def test_two_that_start_at_once_compile_once(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = use_compiler(tiny, monkeypatch, f'exec {REAL} "$@"')
    with ThreadPoolExecutor(4) as pool:
        paths = list(pool.map(lambda _: make_library(PLAIN, tiny / "cache"), range(4)))
    assert len(set(paths)) == 1
    assert len(calls.read_text().splitlines()) == 2, "one call to compile and one to link"


def test_what_a_broken_compiler_says_is_in_the_reason(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_compiler(tiny, monkeypatch, "echo 'internal error: no space left' >&2; exit 3")
    with pytest.raises(CompileError, match="internal error: no space left"):
        load_library(str(tiny / "cache"))
    assert not list((tiny / "cache").glob("*.so"))


def test_without_a_compiler_the_reason_says_what_to_install(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_compiler(monkeypatch)
    with pytest.raises(CompileError, match=r"no C\+\+ compiler \(Debian has one in the package g\+\+\)"):
        load_library(str(tiny / "cache"))
    assert describe(str(tiny / "cache")) == (False, "better, but there is no C++ compiler")


@needs_compiler
def test_an_old_compiler_makes_the_next_best(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_compiler(tiny, monkeypatch, f'case "$*" in *BETTER*) exit 1;; esac; exec {REAL} "$@"')
    assert load_library(str(tiny / "cache")).usable()
    assert [path.name for path in (tiny / "cache").glob("*.so")] == [library_name(PLAIN)]


@needs_compiler
def test_a_full_disk_is_a_reason_and_leaves_nothing(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(number: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(CompileError, match="No space left on device"):
        load_library(str(tiny / "cache"))
    assert [path.name for path in (tiny / "cache").iterdir()] == [".lock"]


@needs_compiler
@pytest.mark.parametrize("damage", [b"", b"\x7fELF and nothing more"])
def test_a_damaged_library_is_made_anew(tiny: Path, damage: bytes, caplog: pytest.LogCaptureFixture) -> None:
    path = make_library(BETTER, tiny / "cache")
    path.write_bytes(damage)
    assert load_library(str(tiny / "cache")).usable()
    assert "cannot be loaded" in caplog.text
    assert path.read_bytes() != damage


@needs_compiler
def test_what_a_killed_compiler_left_and_the_oldest_libraries_go(tiny: Path) -> None:
    cache = tiny / "cache"
    (cache / ".compiling-left").mkdir(parents=True, mode=0o700)
    for age in range(COMPILED_LIBRARIES_MAX):
        (cache / f"old-{age}.so").touch()
        os.utime(cache / f"old-{age}.so", (1000 - age, 1000 - age))
    made = make_library(PLAIN, cache)
    assert not (cache / ".compiling-left").exists()
    left = {path.name for path in cache.glob("*.so")}
    assert len(left) == COMPILED_LIBRARIES_MAX
    assert made.name in left
    assert f"old-{COMPILED_LIBRARIES_MAX - 1}.so" not in left


@needs_compiler
def test_what_is_compiled_ahead_lies_beside_the_sources_for_everybody_to_read(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "usable_variants", lambda: [BETTER, PLAIN])
    monkeypatch.setattr(command, "VARIANTS", (Variant("better", os.uname().machine, BETTER.flags, frozenset()),))
    assert command.main([]) == 0
    path = tiny / "beside" / library_name(BETTER)
    assert capsys.readouterr().out == f"compiled: {path.name}\n"
    assert path.stat().st_mode & 0o555 == 0o555
    assert path.parent.stat().st_mode & 0o555 == 0o555
    without_compiler(monkeypatch)
    assert find_library(BETTER, tiny / "cache") == path
    assert command.main([]) == command.main(["--all"]) == 0
    assert command.main(["--which"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "better, compiled"


def test_without_a_compiler_compiling_ahead_is_a_notice_and_for_an_image_a_failure(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "usable_variants", lambda: [PLAIN])
    monkeypatch.setattr(command, "VARIANTS", (Variant("any", os.uname().machine, (), frozenset()),))
    without_compiler(monkeypatch)
    assert (command.main([]), command.main(["--all"])) == (0, 1)
    assert "PyTorch's operations instead" in capsys.readouterr().err
