"""A model with the cache of transformers through the whole system, also when an engine is killed."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

from tests.models import greedy_reference, make_model
from tests.system.served import Served, serve_tiny, until_the_end

pytestmark = [pytest.mark.system, pytest.mark.nats, pytest.mark.model, pytest.mark.timeout(300)]
PROMPT, NUM_TOKENS, NUM_STREAMS = "Once upon a time", 200, 4


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("hybrid"), "olmo_hybrid")


@pytest.fixture(scope="module")
def served(hybrid: Path) -> Iterator[Served]:
    with until_the_end(serve_tiny(hybrid, "--dtype=float32", "--engines=2", "--threads=1")) as started:
        yield started


def test_streams_have_the_text_of_transformers_although_an_engine_is_killed(served: Served, hybrid: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(hybrid / "tokenizer.json"))
    expected = greedy_reference(hybrid, tokenizer.encode(PROMPT).ids, NUM_TOKENS)
    body = {"ignore_eos": True, "return_token_ids": True}

    def read(stream: openai.Stream[openai.types.Completion]) -> list[int]:
        return [token for chunk in stream for token in chunk.choices[0].model_extra["token_ids"]]  # type: ignore[index]

    with openai.OpenAI(base_url=served.url, api_key="EMPTY", max_retries=0, timeout=90) as client:
        streams = [
            client.completions.create(
                model="tiny", prompt=PROMPT, max_tokens=NUM_TOKENS, temperature=0, stream=True, extra_body=body
            )
            for _ in range(NUM_STREAMS)
        ]
        os.kill(served.pids()["engine-1"], signal.SIGKILL)
        with ThreadPoolExecutor(NUM_STREAMS) as pool:
            assert list(pool.map(read, streams)) == [expected] * NUM_STREAMS
    assert "runs through transformers with a cache of its own" in served.output
