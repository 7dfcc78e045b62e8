"""Models with recurrent states through the whole system: a prompt goes on from the state that an earlier one left."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.models import make_model
from tests.system.models.greedy_streams import expected, read
from tests.system.served import Served, fetch, serve_tiny, until_the_end

pytestmark = [pytest.mark.system, pytest.mark.nats, pytest.mark.model, pytest.mark.timeout(300)]
KINDS = {"lfm2": "lfm2", "gated delta rule": "qwen3_5_text", "no attention": "mamba"}
FLAGS = ("--dtype=float32", "--block-size=16", "--threads=1")
LONG = "The state after this sentence is kept, and the next question goes on from it. " * 4


@pytest.fixture(scope="module", params=KINDS)
def hybrid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("hybrid"), KINDS[request.param])


@pytest.fixture(scope="module")
def served(hybrid: Path) -> Iterator[Served]:
    with until_the_end(serve_tiny(hybrid, *FLAGS)) as started:
        yield started


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
