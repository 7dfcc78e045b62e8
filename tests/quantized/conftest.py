"""Every instruction set of this processor, compiled before the first test."""

import pytest

from tests.native.libraries import compile_all


@pytest.fixture(scope="session", autouse=True)
def _compiled() -> None:
    compile_all()
