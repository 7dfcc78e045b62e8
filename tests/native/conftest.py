"""Small models of odd sizes, each made once."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.models import make_model
from tests.native.libraries import compile_all
from tests.native.shapes import SHAPES


@pytest.fixture(scope="session", autouse=True)
def _compiled() -> None:
    compile_all()


@pytest.fixture(scope="session")
def odd_models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Gives a shape's model; its weights are bfloat16, so that both types compute with the same numbers."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            family, fields = SHAPES[name]
            made[name] = make_model(tmp_path_factory.mktemp("odd"), family, dtype="bfloat16", **fields)
        return made[name]

    return make
