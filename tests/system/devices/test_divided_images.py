"""Images on engines of two ranks, the prompt computed by one engine and the output by another."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from tests.system.models.test_images import ONE, TWO, ask, expected, part, text_of, words
from tests.system.served import Served, fetch, serve_tiny, until_the_end
from tests.vision_models import image, make_vision_model

pytestmark = [pytest.mark.system, pytest.mark.nats, pytest.mark.model, pytest.mark.timeout(240)]
FLAGS = ("--enable-mm", "--dtype=float32", "--device=cpu", "-tp=2", "--prefill=1", "--decode=1")
LONG = 100


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_model(tmp_path_factory.mktemp("vision"), "glm4v")


@pytest.fixture(scope="module")
def served(model: Path) -> Iterator[Served]:
    with until_the_end(serve_tiny(model, *FLAGS)) as started:
        yield started


@pytest.mark.spec("S-SRV-090", "S-DIS-001")
def test_images_are_answered_as_transformers_answers_them(served: Served, model: Path) -> None:
    content: list[tuple[list[Any], list[bytes | str]]] = [
        ([words("What is this"), part(ONE)], ["What is this", ONE]),
        ([part(TWO, "jpeg"), words("and"), part(ONE)], [TWO, "and", ONE]),
    ]
    for asked, reference in content:
        assert text_of(ask(served, asked)) == expected(model, reference)[1]
    assert b'antiphon:engine_kv_loaded_tokens_total{engine="decode-1"' in fetch(served, "GET", "/metrics").body


@pytest.mark.spec("S-SRV-090")
def test_a_stream_goes_on_when_its_engine_dies(served: Served, model: Path) -> None:
    file = image(120, 60, 5)
    text = expected(model, ["Once", file, "upon"], LONG)[1]
    content: Any = [words("Once"), part(file), words("upon")]
    parts, killed = list[str](), False
    with OpenAI(base_url=served.url, api_key="EMPTY", max_retries=0, timeout=120) as client:
        stream = client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": content}],
            temperature=0,
            max_tokens=LONG,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        for chunk in stream:
            parts += [chunk.choices[0].delta.content or ""] if chunk.choices else []
            if len(parts) > 2 and not killed:
                killed = True
                os.kill(served.pids()["decode-1"], signal.SIGKILL)
    assert killed
    assert "".join(parts) == text
