"""Two models behind one gateway, with real processes: each answers by itself, and loses an engine in mid-stream."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from antiphon.async_client import get
from antiphon.shared.subjects import model_token
from tests.models import make_model
from tests.system.served import READY_S, Served, fetch, slowed, until_the_end, wait_until

pytestmark = [pytest.mark.system, pytest.mark.nats, pytest.mark.timeout(300)]
SECOND = "org/second.v1"
ENGINES = {"tiny": "engine", SECOND: f"{model_token(SECOND)}-engine"}
STREAMS, TOKENS = 4, 400


@pytest.fixture(scope="module")
def pair(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Two of each service for each model. The second model has other weights, another family and a shorter context."""
    second = tmp_path_factory.mktemp("second")
    other = make_model(second, "qwen2", seed=7, max_position_embeddings=448, num_hidden_layers=8)
    flags = ("--tokenizers=2", "--engines=2", "--detokenizers=2", "--threads=1")
    served = Served(f"--model={model}", "--served-model-name=tiny", f"--also={other}={SECOND}", *flags)
    with until_the_end(served) as started:
        yield started


def test_both_models_are_listed_and_a_request_without_a_name_means_the_first(pair: Served) -> None:
    assert "models     tiny, org/second.v1" in pair.output
    cards = fetch(pair, "GET", "/v1/models").json["data"]
    assert [(card["id"], card["max_model_len"]) for card in cards] == [("tiny", 512), (SECOND, 448)]
    assert fetch(pair, "GET", f"/v1/models/{SECOND}").json["id"] == SECOND
    ask = {"prompt": "Once", "max_tokens": 4, "temperature": 0}
    answers = [fetch(pair, "POST", "/v1/completions", ask | name).json for name in ({}, {"model": "tiny"})]
    assert [answer["model"] for answer in answers] == ["tiny", "tiny"]
    assert answers[0]["choices"][0]["text"] == answers[1]["choices"][0]["text"]
    unknown = fetch(pair, "POST", "/v1/completions", ask | {"model": "third"})
    assert (unknown.status, unknown.json["error"]["code"]) == (404, "model_not_found")


def test_tokens_and_text_are_those_of_the_request_s_model(pair: Served) -> None:
    for name, length in (("tiny", 512), (SECOND, 448)):
        answer = fetch(pair, "POST", "/tokenize", {"model": name, "prompt": "Once upon"}).json
        assert answer["max_model_len"] == length
        back = fetch(pair, "POST", "/detokenize", {"model": name, "tokens": answer["tokens"]}).json
        assert back["prompt"] == "Once upon"


async def test_each_model_loses_an_engine_in_mid_stream_and_every_answer_is_the_unfaulted_one(pair: Served) -> None:
    await _until_all_engines(pair)
    async with openai.AsyncOpenAI(base_url=pair.url, api_key="EMPTY", max_retries=0, timeout=90) as client:
        asked = [(name, number) for name in ENGINES for number in range(STREAMS)]
        alone = await asyncio.gather(*(_stream(client, *one) for one in asked))
        assert len(set(alone)) == 2 * STREAMS
        flowing = [asyncio.Event() for _ in asked]
        pids = pair.pids()
        with slowed(*(pid for name, pid in pids.items() if "engine-" in name)):
            pairs = zip(asked, flowing, strict=True)
            again = [asyncio.create_task(_stream(client, *one, event)) for one, event in pairs]
            for place, engine in enumerate(ENGINES.values()):
                streams = slice(place * STREAMS, (place + 1) * STREAMS)
                async with asyncio.timeout(60):
                    # All streams of a model were asked for at once: some have text, and none may be over.
                    await asyncio.wait(
                        [asyncio.create_task(e.wait()) for e in flowing[streams]], return_when=asyncio.FIRST_COMPLETED
                    )
                os.kill(pids[f"{engine}-1"], signal.SIGKILL)
                assert not all(task.done() for task in again[streams]), "the streams ended before the engine was killed"
        assert await asyncio.gather(*again) == alone
    wait_until(lambda: all(pair.pids().get(f"{e}-1", pids[f"{e}-1"]) != pids[f"{e}-1"] for e in ENGINES.values()), 60)


async def _stream(client: openai.AsyncOpenAI, model: str, number: int, flowing: asyncio.Event | None = None) -> str:
    """A whole streamed answer. `flowing` is set at its first text."""
    text, reason = "", None
    more = {"max_tokens": TOKENS, "temperature": 0.8, "seed": number, "extra_body": {"ignore_eos": True}}
    async for chunk in await client.completions.create(model=model, prompt=f"Once {number}", stream=True, **more):
        assert chunk.model == model
        text += chunk.choices[0].text
        reason = chunk.choices[0].finish_reason
        if flowing is not None and text:
            flowing.set()
    assert reason == "length"
    return text


async def _until_all_engines(pair: Served) -> None:
    """The system is ready with one engine of each model; the others may come a moment later."""
    async with asyncio.timeout(READY_S):
        while True:
            page = (await get("127.0.0.1", pair.port, "/metrics")).body.decode()
            if page.count("vllm:cache_config_info{") == 2 * len(ENGINES):
                return
            await asyncio.sleep(0.05)
