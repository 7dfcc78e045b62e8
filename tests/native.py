"""The C++ backend for tests: every instruction set of this processor, compiled once for each state of its sources."""

import functools
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from services.engine.cpu.compile import (
    COMPILERS,
    Variant,
    cache_directory,
    find_library,
    make_library,
    usable_variants,
)
from services.engine.cpu.native import Library
from services.engine.cpu.worker import CpuWorker
from shared.config import EngineSettings

VARIANTS = tuple(variant.name for variant in usable_variants())
"""The best first."""
BEST = VARIANTS[0] if VARIANTS else "none"
COMPILER = next((path for name in COMPILERS if (path := shutil.which(name))), None)


def make_cpu_worker(directory: Path, settings: EngineSettings, variant: str = BEST) -> CpuWorker:
    """A worker that computes with a variant."""
    return CpuWorker(settings, directory, library(variant))


@functools.cache
def library(name: str = BEST) -> Library:
    """A variant's library; skips the test where this machine cannot have one."""
    loaded = Library(_path_of(name))
    if not loaded.usable():
        pytest.skip(f"the system does not let programs use {name}")
    return loaded


def compile_all() -> None:
    """Every variant of this processor, several at once: what is there already costs nothing."""
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(_path_of, VARIANTS))


def _path_of(name: str) -> Path:
    cache = cache_directory("")
    return find_library(_variant(name), cache) or make_library(_variant(name), cache)


def _variant(name: str) -> Variant:
    if not VARIANTS or COMPILER is None:
        pytest.skip("the C++ backend needs a compiler (g++ or clang++) and a processor that it knows")
    return next(variant for variant in usable_variants() if variant.name == name)
