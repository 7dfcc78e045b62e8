"""A small model for the tests of transfers."""

from pathlib import Path

import pytest

from tests.models import make_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))
