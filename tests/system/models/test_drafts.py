"""`--use-mtp` through the whole system: the text of transformers in fewer steps, whatever happens to an engine."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.draft_models import make_prophet
from tests.system.models.greedy_streams import counted, expected, read
from tests.system.served import Served, serve_tiny, until_the_end, wait_until

pytestmark = [pytest.mark.system, pytest.mark.nats, pytest.mark.model, pytest.mark.timeout(300)]
FAMILIES = {"qwen3_5_text": 0.6, "deepseek_v3": 0.75}
"""One with recurrent states, whose layer is right for a third of the tokens, one with latent attention and a good one.
"""
FLAGS = ("--dtype=float32", "--block-size=16", "--threads=1", "--use-mtp", "--num-speculative-tokens=3")
ACCEPTED = "vllm:spec_decode_num_accepted_tokens"


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_prophet(tmp_path_factory.mktemp(request.param), request.param, FAMILIES[request.param])


@pytest.fixture(scope="module")
def served(model: Path) -> Iterator[Served]:
    with until_the_end(serve_tiny(model, *FLAGS, "--engines=2")) as started:
        yield started


def drafts_are_accepted(served: Served, model: Path, prompts: list[str], count: int, engine: str) -> None:
    """Asks until the account of time lets the layer predict, and a prediction is right."""
    right = [expected(model, prompt, count) for prompt in prompts]

    def accepted() -> bool:
        assert read(served, prompts, count) == right
        return counted(served, ACCEPTED, engine) > 0

    wait_until(accepted, 60, lambda: served.output)


def test_streams_have_the_tokens_of_transformers_although_an_engine_is_killed(served: Served, model: Path) -> None:
    prompts = ["Once upon a time", "Once upon a time", "Twice", "Twice upon a time"]
    drafts_are_accepted(served, model, prompts, 200, "")
    right = [expected(model, prompt, 200) for prompt in prompts]
    assert read(served, prompts, 200, killed="engine-") == right
    assert "--use-mtp has no effect" not in served.output


def test_a_decode_engine_predicts_for_what_a_prefill_engine_sends(model: Path) -> None:
    prompts = [f"{number} The layer's own entries are sent with the blocks. {number}" for number in range(4)]
    with until_the_end(serve_tiny(model, *FLAGS, "--swap-space=0.02", "--prefill=1", "--decode=1")) as separated:
        drafts_are_accepted(separated, model, prompts, 60, "decode-1")
        assert counted(separated, "antiphon:engine_kv_loaded_tokens", "decode-1") > 0
