"""Quantized matrices under the compiler's sanitizers: memory, undefined behaviour, and threads.

Without tiles, whose loads no sanitizer sees; on a processor with AVX512 that is what does most of the work there too.
"""

import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from services.engine.cpu.compile import SOURCE, usable_variants
from tests.native.libraries import need_compiler
from tests.quantized.harness import driver_source

pytestmark = pytest.mark.timeout(300)
SANITIZERS = {"address": "address,undefined", "thread": "thread"}
FLAGS = ("-std=c++17", "-O1", "-g", "-pthread", "-Wno-psabi", "-Wno-uninitialized", "-Wno-maybe-uninitialized")
WRAPPED = "-Wl,--wrap=mmap,--wrap=munmap,--wrap=madvise"


@pytest.fixture(scope="module")
def drivers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The driver with each sanitizer, compiled together."""
    variants = [variant for variant in usable_variants() if variant.name != "amx"]
    compiler = need_compiler()
    if not variants:
        pytest.skip("the library knows no instruction set of this processor that sanitizers see")
    directory = tmp_path_factory.mktemp("drivers")

    def compiled(name: str) -> Path:
        path = directory / name
        flags = (*FLAGS, *variants[0].flags, f"-fsanitize={SANITIZERS[name]}", "-fno-sanitize-recover=all", WRAPPED)
        sources = (str(driver_source()), str(SOURCE / "pool.cpp"))
        command = [compiler, *flags, f"-I{SOURCE}", *sources, "-o", str(path)]
        done = subprocess.run(command, capture_output=True, text=True)
        if "cannot find" in done.stderr and "san" in done.stderr:
            pytest.skip(f"the compiler has no sanitizer for {name}")
        assert done.returncode == 0, done.stderr[-3000:]
        return path

    with ThreadPoolExecutor(len(SANITIZERS)) as pool:
        return dict(zip(SANITIZERS, pool.map(compiled, SANITIZERS), strict=True))


@pytest.mark.parametrize("name", SANITIZERS)
def test_sanitizers_find_nothing(drivers: dict[str, Path], name: str) -> None:
    done = subprocess.run([drivers[name], "3"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert done.stdout.count("good") == 80
