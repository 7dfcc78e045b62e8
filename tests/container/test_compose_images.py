"""docker-compose.yml with the profile `images`: an image goes from the client to the image service and the engine.

Needs Docker and docker-compose; run by `make container-test`, never by `make test`.
"""

import base64
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.container.stack import NAME, Stack, readable, started
from tests.vision_models import image, make_vision_model

pytestmark = [pytest.mark.container, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    model = readable(make_vision_model(tmp_path_factory.mktemp("model"), "qwen2_5_vl"))
    with started(model, images=True, replicas=1) as made:
        yield made


def ask(stack: Stack, *files: bytes) -> tuple[int, str]:
    """The number of tokens of a prompt with these images, and the answer."""
    urls = [f"data:image/png;base64,{base64.b64encode(file).decode()}" for file in files]
    content: list[Any] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    content.append({"type": "text", "text": "What is this?"})
    with openai.OpenAI(base_url=stack.balanced(), api_key="EMPTY", max_retries=0, timeout=60) as client:
        answer = client.chat.completions.create(
            model=NAME, messages=[{"role": "user", "content": content}], temperature=0, max_tokens=16
        )
    assert answer.usage
    return answer.usage.prompt_tokens, answer.choices[0].message.content or ""


def test_images_are_answered_through_the_image_service(stack: Stack) -> None:
    one, other = image(100, 80, 1), image(100, 80, 2)
    without, plain = ask(stack)
    with_one, first = ask(stack, one)
    assert with_one > without + 2, "the image has tokens of its own"
    assert ask(stack, one) == (with_one, first)
    assert ask(stack, other)[0] == with_one
    assert len({plain, first, ask(stack, other)[1]}) == 3, "each image has an answer of its own"
    assert ask(stack, one, other)[0] > with_one + 2


def test_a_file_that_is_no_image_is_refused(stack: Stack) -> None:
    with pytest.raises(openai.BadRequestError):
        ask(stack, b"no image")
