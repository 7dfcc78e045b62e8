"""Fixtures of the tests that run the whole system. A module that needs other flags has its own `served`."""

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from antiphon import LLM
from tests.models import make_model
from tests.system.offline import FLAGS
from tests.system.served import Served, serve_tiny, until_the_end


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def served(model: Path) -> Iterator[Served]:
    """Shared by the tests that leave it as it was."""
    with until_the_end(serve_tiny(model)) as started:
        yield started


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    """The offline API, with the flags that its tests share."""
    with LLM(str(model), **FLAGS) as made:
        yield made


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=served.url, api_key="EMPTY", max_retries=0, timeout=60) as made:
        yield made
