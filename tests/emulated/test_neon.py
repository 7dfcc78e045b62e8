"""The CPU backend as an ARM processor runs it, in an emulator: `make neon-test`."""

import shutil
from pathlib import Path

import pytest

from antiphon.services.engine.backends.cpu.compile import VARIANTS, usable_variants
from tests.native.drivers import build, numbers
from tests.native.libraries import need_compiler

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64-static"
NEON = next(variant for variant in VARIANTS if variant.name == "neon")


@pytest.mark.skipif(
    not (shutil.which(COMPILER) and shutil.which(EMULATOR)),
    reason=f"needs {COMPILER} and {EMULATOR} (qemu-user-static)",
)
def test_neon_compiles_without_a_warning_and_gives_the_numbers_of_this_processor(tmp_path: Path) -> None:
    ours = build(tmp_path, "here", need_compiler(), "-O3", *usable_variants()[-1].flags)
    neon = build(tmp_path, "neon", COMPILER, "-O3", "-static", *NEON.flags)
    here, there = numbers([str(ours), "3"]), numbers([EMULATOR, str(neon), "3"])
    assert there.keys() == here.keys()
    for name, values in there.items():
        assert values == pytest.approx(here[name], abs=2e-3), name
