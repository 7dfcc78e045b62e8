"""Models with recurrent states through the whole system: the text of transformers, whatever happens to an engine."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.models import make_model
from tests.system.models.greedy_streams import counted, expected, read
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

        def numbers() -> list[float]:
            names = ("engine_kv_saved_tokens", "engine_kv_loaded_tokens", "engine_kv_failed_loads")
            return [counted(separated, f"antiphon:{name}", "") for name in names]

        # Heartbeats bring them. A prefill engine samples the first token of each stream.
        tokens = "antiphon:engine_generation_tokens"
        wait_until(lambda: counted(separated, tokens, "prefill-1") == len(prompts), 20, lambda: separated.output)
        wait_until(lambda: 0 < numbers()[0] == numbers()[1], 20, lambda: f"{numbers()} {separated.output}")
        assert numbers()[2] == 0
