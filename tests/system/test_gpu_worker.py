"""The whole system on the GPU worker, its kernels under Triton's interpreter: the text of the other backends."""

from pathlib import Path

import openai
import pytest

from tests.system.served import serve_tiny, until_the_end

pytestmark = [pytest.mark.system, pytest.mark.nats, pytest.mark.timeout(240)]
ASKS = (
    {"prompt": "the water was", "temperature": 0},
    {"prompt": "a word", "temperature": 0.9, "top_p": 0.8, "seed": 7},
)


def answers(model: Path, backend: str) -> list[str]:
    flags = (f"--cpu-backend={backend}", "--max-num-seqs=2", "--max-model-len=64")
    with until_the_end(serve_tiny(model, *flags, environ={"TRITON_INTERPRET": "1"})) as served:
        assert (backend == "triton") == ("Triton's interpreter" in served.output)
        with openai.OpenAI(base_url=served.url, api_key="EMPTY", max_retries=0, timeout=120) as client:
            done = [client.completions.create(model="tiny", max_tokens=4, **ask) for ask in ASKS]
    return [answer.choices[0].text for answer in done]


def test_answers_through_the_gateway_are_those_of_the_torch_backend(model: Path) -> None:
    ours = answers(model, "triton")
    assert all(ours)
    assert ours == answers(model, "torch")
