"""A prompt that a client has pinned is read from the disk after others have needed its room, as its usage tells."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from tests.models import make_model
from tests.system.served import fetch, serve_tiny, until_the_end

pytestmark = [pytest.mark.system, pytest.mark.nats, pytest.mark.timeout(200)]
TEXT = "This is the beginning of many conversations, {}, and it takes more tokens than a short prompt. " * 5
"""More tokens than `limits.KV_TIER_TOKENS_MIN`."""
GREEDY = {"temperature": 0}


@contextmanager
def serving(model: Path, disk: Path) -> Iterator[tuple[Any, Any, Any]]:
    """A server with room for about ten prompts on its disk, and the clients of both APIs."""
    flags = ("--threads=1", "--kv-disk-gb=0.004", f"--kv-disk-path={disk}", "--swap-space=0.05", "--block-size=16")
    with until_the_end(serve_tiny(model, *flags)) as served:
        url = served.url.removesuffix("/v1")
        with (
            anthropic.Anthropic(base_url=url, api_key="EMPTY", max_retries=0, timeout=60) as claude,
            openai.OpenAI(base_url=f"{url}/v1", api_key="EMPTY", max_retries=0, timeout=60) as gpt,
        ):
            yield served, claude, gpt


def say(name: str, **fields: Any) -> Any:
    block = {"type": "text", "text": TEXT.replace("{}", name), **fields}
    return {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": [block]}]}


def cached(message: anthropic.types.Message) -> int:
    assert message.usage.cache_read_input_tokens is not None
    return message.usage.cache_read_input_tokens


def num_prompt_tokens(message: anthropic.types.Message) -> int:
    return message.usage.input_tokens + (message.usage.cache_creation_input_tokens or 0) + cached(message)


def test_pinned_prompts_survive_what_deletes_others(tmp_path: Path) -> None:
    model, disk = make_model(tmp_path / "model" / "tiny", "llama", max_position_embeddings=2048), tmp_path / "kv"
    hour, day = {"type": "ephemeral", "ttl": "1h"}, {"prompt_cache_retention": "24h"}
    with serving(model, disk) as (served, claude, gpt):
        raw = claude.messages.with_raw_response.create(**say("by mark", cache_control=hour), extra_body=GREEDY)
        assert "x-antiphon-ignored" not in raw.headers
        first = raw.parse()
        assert cached(first) == 0
        assert first.usage.cache_creation_input_tokens is not None
        assert first.usage.cache_creation_input_tokens > 256
        gpt.chat.completions.create(**say("by retention"), extra_body=day)
        assert cached(claude.messages.create(**say("without"))) < 256
        for number in range(30):
            fetch(served, "POST", "/v1/chat/completions", say(f"{number} of others"))
    with serving(model, disk) as (_, claude, gpt):
        again = claude.messages.create(**say("by mark", cache_control=hour), extra_body=GREEDY)
        assert cached(again) > 256
        assert num_prompt_tokens(again) == num_prompt_tokens(first)
        assert again.content == first.content
        used = gpt.chat.completions.create(**say("by retention")).usage
        assert used.prompt_tokens_details.cached_tokens > 256
        assert cached(claude.messages.create(**say("without"))) < 256
