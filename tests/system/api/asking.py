"""Short ways to ask the system something through the openai client."""

from typing import Any

import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion

CONTEXT = 256
"""--max-model-len of the system."""
PROMPT = "Once upon a time"
HELLO = [{"role": "user", "content": "Hello"}]


def complete(client: openai.OpenAI, prompt: Any = PROMPT, **fields: Any) -> Completion:
    """Every field goes as it is: those that the client does not know too."""
    return client.completions.create(model="model", prompt=prompt, extra_body=fields)


def chat(client: openai.OpenAI, messages: Any = HELLO, **fields: Any) -> ChatCompletion:
    return client.chat.completions.create(model="model", messages=messages, extra_body=fields)


def texts(answer: Completion) -> list[str]:
    return [choice.text for choice in answer.choices]


def usage(answer: Completion | ChatCompletion) -> tuple[int, int]:
    """Prompt and output tokens."""
    assert answer.usage is not None
    return answer.usage.prompt_tokens, answer.usage.completion_tokens


def refused(client: openai.OpenAI, param: str, **fields: Any) -> None:
    """Both endpoints refuse these fields with 400 and name `param`."""
    for ask in (complete, chat):
        with pytest.raises(openai.BadRequestError) as error:
            ask(client, **fields)
        assert (error.value.status_code, error.value.param) == (400, param)
        assert error.value.type == "invalid_request_error"
        assert param in error.value.message
