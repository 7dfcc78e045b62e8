"""The C++ backend for tests: every instruction set of this processor, compiled once for each state of its sources."""

import functools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from antiphon.services.engine.backends.cpu.compile import Variant, find_compiler, make_library, usable_variants
from antiphon.services.engine.backends.cpu.library import cache_directory, find_library
from antiphon.services.engine.backends.cpu.native import Library
from antiphon.services.engine.backends.cpu.worker import CpuWorker
from antiphon.shared.config import EngineSettings

VARIANTS = {variant.name: variant for variant in usable_variants()}
"""The best first."""
BEST = next(iter(VARIANTS), "none")


def make_cpu_worker(directory: Path, settings: EngineSettings, variant: str = BEST) -> CpuWorker:
    """A worker that computes with a variant."""
    return CpuWorker(settings, directory, library(variant))


@functools.cache
def library(name: str = BEST) -> Library:
    """A variant's library; skips the test where this machine cannot have one."""
    need_compiler()
    if name not in VARIANTS:
        pytest.skip("the C++ backend knows no instruction set of this processor")
    loaded = Library(_path_of(VARIANTS[name]))
    if not loaded.usable():
        pytest.skip(f"the system does not let programs use {name}")
    return loaded


def need_compiler() -> str:
    """The path of the compiler; skips the test where there is none."""
    compiler = find_compiler()
    if compiler is None:
        pytest.skip("the C++ backend needs a compiler: g++ or clang++")
    return compiler


def compile_all() -> None:
    """Every variant, several at once; what is there already costs nothing."""
    need_compiler()
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(_path_of, VARIANTS.values()))


def _path_of(variant: Variant) -> Path:
    cache = cache_directory("")
    assert cache is not None
    return find_library(variant, cache) or make_library(variant, cache)
