"""The C++ alone, built to find what reads or writes where it must not, and threads that race."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from antiphon.services.engine.backends.cpu.compile import usable_variants
from tests.native.drivers import HEAP, build, kept, numbers
from tests.native.libraries import need_compiler

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # two builds the first time, beside other tests

SANITIZERS = {
    "memory": ("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", *HEAP),
    "threads": ("-O1", "-fsanitize=thread", *HEAP),
}


@pytest.fixture(scope="module")
def drivers() -> dict[str, Path]:
    """For the plainest instructions, in which everything is memory that the compiler knows of."""
    compiler, directory = need_compiler(), kept()
    plainest = usable_variants()[-1].flags
    with ThreadPoolExecutor() as pool:
        made = {
            name: pool.submit(build, directory, name, compiler, *plainest, *flags) for name, flags in SANITIZERS.items()
        }
        return {name: future.result() for name, future in made.items()}


@pytest.mark.parametrize("kind", SANITIZERS)
def test_mixed_steps_of_every_kind_of_model_are_clean_and_the_same_on_one_thread_and_four(
    kind: str, drivers: dict[str, Path]
) -> None:
    found = numbers([str(drivers[kind]), "4"])
    assert len(found) == 42
    assert all(abs(value) < 100 for values in found.values() for value in values)
    for name, values in found.items():
        if name.endswith("bfloat16"):
            wide = found[name.replace("bfloat16", "float32")]
            # Rounding to 8 bits moves keys and values that differ little by a whole step, which is up to an eighth.
            assert values == pytest.approx(wide, abs=1.0 if "8 bits" in name else 0.3), name
