"""Models with recurrent states through the whole system: the text of transformers, whatever happens to an engine."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

from tests.models import greedy_reference, make_model
from tests.system.served import Served, fetch, serve_tiny, until_the_end, wait_until

pytestmark = [pytest.mark.system, pytest.mark.nats, pytest.mark.model, pytest.mark.timeout(180)]
KINDS = {"lfm2": "lfm2", "gated delta rule": "qwen3_5_text", "no attention": "mamba"}
FLAGS = ("--dtype=float32", "--block-size=16", "--threads=1")
LONG = "The state after this sentence is kept, and the next question goes on from it. " * 4


@pytest.fixture(scope="module", params=KINDS)
def hybrid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("hybrid"), KINDS[request.param])


@pytest.fixture(scope="module")
def served(hybrid: Path) -> Iterator[Served]:
    with until_the_end(serve_tiny(hybrid, *FLAGS, "--engines=2")) as started:
        yield started


def expected(hybrid: Path, prompt: str, count: int) -> list[int]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(hybrid / "tokenizer.json"))
    return greedy_reference(hybrid, tokenizer.encode(prompt).ids, count)


def read(served: Served, prompts: list[str], count: int, killed: str = "") -> list[list[int]]:
    """The token ids of greedy streams. `killed`: an engine that is killed when all of them have been asked for."""
    body = {"ignore_eos": True, "return_token_ids": True}

    def ids(stream: openai.Stream[openai.types.Completion]) -> list[int]:
        return [token for chunk in stream for token in chunk.choices[0].model_extra["token_ids"]]  # type: ignore[index]

    with openai.OpenAI(base_url=served.url, api_key="EMPTY", max_retries=0, timeout=90) as client:
        streams = [
            client.completions.create(
                model="tiny", prompt=prompt, max_tokens=count, temperature=0, stream=True, extra_body=body
            )
            for prompt in prompts
        ]
        if killed:
            os.kill(served.pids()[killed], signal.SIGKILL)
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(ids, streams))


def test_streams_have_the_tokens_of_transformers_although_an_engine_is_killed(served: Served, hybrid: Path) -> None:
    prompts = ["Once upon a time", "Once upon a time", "Twice", "Twice upon a time"]
    right = [expected(hybrid, prompt, 200) for prompt in prompts]
    assert read(served, prompts, 200, killed="engine-1") == right
    assert "through transformers" not in served.output


def test_a_prompt_that_begins_as_an_earlier_one_goes_on_from_its_state(served: Served, hybrid: Path) -> None:
    def ask(question: str) -> tuple[str, int]:
        body = {"model": "tiny", "prompt": LONG + question, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        answer = fetch(served, "POST", "/v1/completions", body).json
        return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    # The second question parts from the first one where no state was kept, and leaves one there for the third.
    found = [ask(question) for question in ("First of all, what?", "Second of all, what?", "Third of all, what?")]
    assert found[0][1] == 0
    assert found[2][1] >= 64
    assert ask("Third of all, what?")[0] == found[2][0]
    (right,) = read(served, [LONG + "Third of all, what?"], 12)
    assert right == expected(hybrid, LONG + "Third of all, what?", 12)


def test_a_decode_engine_goes_on_from_the_state_that_a_prefill_engine_sends(hybrid: Path) -> None:
    flags = (*FLAGS, "--swap-space=0.02", "--prefill=1", "--decode=1")
    prompts = [f"{number} {LONG}{number}" for number in range(6)]
    with until_the_end(serve_tiny(hybrid, *flags)) as separated:
        assert read(separated, prompts, 30) == [expected(hybrid, prompt, 30) for prompt in prompts]

        def counted(name: str, engine: str) -> float:
            lines = fetch(separated, "GET", "/metrics").body.decode().splitlines()
            found = (line for line in lines if line.startswith(f"antiphon:engine_{name}_total{{"))
            return sum(float(line.rpartition(" ")[2]) for line in found if f'engine="{engine}' in line)

        wait_until(lambda: counted("kv_loaded_tokens", "decode-1") > 0, 20, lambda: separated.output)
        wait_until(lambda: counted("generation_tokens", "prefill-1") == len(prompts), 20, lambda: separated.output)
        assert not counted("kv_failed_loads", "decode-1")
        assert counted("kv_loaded_tokens", "decode-1") == counted("kv_saved_tokens", "prefill-1")
