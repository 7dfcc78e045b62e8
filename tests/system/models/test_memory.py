"""A system whose KV cache is far too small for what is asked at once: requests wait, and nobody else is disturbed."""

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.system.served import Served, until_the_end

pytestmark = [pytest.mark.system, pytest.mark.nats]
CONTEXT, BLOCK_SIZE = 96, 16


@pytest.mark.spec("S-API-083")
async def test_many_choices_in_a_few_blocks_all_end_and_leave_other_requests_as_they_are(model: Path) -> None:
    cache = (f"--block-size={BLOCK_SIZE}", f"--num-gpu-blocks-override={CONTEXT // BLOCK_SIZE}")
    flags = (f"--max-model-len={CONTEXT}", "--max-num-seqs=16", "--served-model-name=m", "--long-outputs=refuse")
    with until_the_end(Served(f"--model={model}", *flags, *cache)) as served:
        async with openai.AsyncOpenAI(base_url=served.url, api_key="EMPTY", max_retries=0, timeout=100) as client:

            async def ask(n: int, max_tokens: int, **fields: Any) -> Any:
                extra = {"ignore_eos": True}
                body = {"model": "m", "prompt": "A", "n": n, "max_tokens": max_tokens, **fields}
                return await client.completions.create(**body, extra_body=extra)

            alone = await ask(1, 40, temperature=0)
            # Each of the 64 sequences needs 3 of the 6 blocks.
            large = [asyncio.create_task(ask(16, 40, seed=number)) for number in range(4)]
            small = [asyncio.create_task(ask(1, 40, temperature=0)) for _ in range(4)]
            for answer in await asyncio.gather(*small):
                assert answer.choices[0].text == alone.choices[0].text
            for answer in await asyncio.gather(*large):
                assert [choice.finish_reason for choice in answer.choices] == ["length"] * 16
                assert answer.usage.completion_tokens == 640
            with pytest.raises(openai.BadRequestError, match=str(CONTEXT)):
                await ask(16, CONTEXT + 1)
            assert (await ask(1, 40, temperature=0)).choices[0].text == alone.choices[0].text
