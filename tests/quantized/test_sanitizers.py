"""Quantized matrices under the compiler's sanitizers: memory, undefined behaviour, and threads.

Without tiles, whose loads no sanitizer sees; on a processor with AVX512 that is what does most of the work there too.
"""

import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from antiphon.services.engine.backends.cpu.compile import CompileError, usable_variants
from tests.native.drivers import HEAP, build, kept
from tests.native.libraries import need_compiler

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # two builds the first time, beside other tests
DRIVER = Path(__file__).with_name("driver.cpp")
SANITIZERS = {
    "address": ("-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
    "thread": ("-O1", "-fsanitize=thread"),
}
"""Optimizing takes longer than it saves, but for threads, whose sanitizer looks at each access of what -O0 leaves."""


@pytest.fixture(scope="module")
def drivers() -> dict[str, Path]:
    """The driver with each sanitizer, compiled together."""
    variants = [variant for variant in usable_variants() if variant.name != "amx"]
    compiler, directory = need_compiler(), kept()
    if not variants:
        pytest.skip("the library knows no instruction set of this processor that sanitizers see")

    def compiled(name: str) -> Path:
        flags = (*variants[0].flags, *SANITIZERS[name], *HEAP)
        try:
            return build(directory, f"quantized-{name}", compiler, *flags, driver=DRIVER, parts=("pool.cpp",))
        except CompileError as error:
            if "cannot find" in str(error) and "san" in str(error):
                pytest.skip(f"the compiler has no sanitizer for {name}")
            raise

    with ThreadPoolExecutor(len(SANITIZERS)) as pool:
        return dict(zip(SANITIZERS, pool.map(compiled, SANITIZERS), strict=True))


@pytest.mark.parametrize("name", SANITIZERS)
def test_sanitizers_find_nothing(drivers: dict[str, Path], name: str) -> None:
    done = subprocess.run([drivers[name], "3"], capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert done.stdout.count("good") == 136
