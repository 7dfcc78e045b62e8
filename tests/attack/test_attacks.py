"""Some of the attacks that take seconds, on one server, without a victim: what they achieve, not how fast it is."""

import random
from collections.abc import Iterator

import pytest

from tests.attack.attack import Make
from tests.attack.kinds import bus, computing, files, fuzz
from tests.attack.place import Place
from tests.attack.target import Keys
from tests.support import warm
from tests.system.served import Served

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]


MAKES: tuple[tuple[Make, float], ...] = (
    (fuzz.bodies, 4.0),
    (fuzz.forms, 3.0),
    (files.hidden_files, 30.0),
    (computing.replay, 60.0),
    (bus.jetstream, 60.0),
    (bus.records, 60.0),
)
"""With their longest time, which only those that send at random use."""


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Place]]:
    """The server, for each attack with a key of its own."""
    folder, keys = tmp_path_factory.mktemp("attack"), Keys()
    keys.write(folder / "keys.toml")
    flags = (f"--files-directory={folder / 'files'}", f"--api-keys-file={folder / 'keys.toml'}")
    served = Served(*flags, "--record-content-mb=16", "--threads=1", environ=warm.EXECUTED)
    try:
        served.wait_for("Antiphon is ready")
        common = served.port, served.process.pid, str(folder / "files"), 1
        yield [Place(*common, each[1], keys.alice, bob) for each, bob in zip(MAKES, keys.bobs, strict=False)]
    finally:
        served.stop()


@pytest.mark.parametrize("number", range(len(MAKES)), ids=[each.__name__ for each, _ in MAKES])
def test_an_attack_achieves_nothing(places: list[Place], number: int) -> None:
    make, place = MAKES[number][0], places[number]
    assert make(place, random.Random(1)).broken == []
    assert place.ask("GET", "/readyz").status == 200
