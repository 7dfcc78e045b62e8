"""`antiphon complete PROMPT`: loads a model in this process and prints the continuation of a text piece by piece."""

import asyncio
import sys
from typing import Any

from antiphon import AsyncLLMEngine, SamplingParams


def run(prompt: str, model: str, params: SamplingParams, *, chat: bool, **settings: Any) -> int:
    """Prints the generated text to standard output. Returns 0, or 1 if generation failed.

    With `chat`, `prompt` is a user message to answer instead of a text to continue. Raises ValueError for settings or a
    model that cannot be used.
    """
    return asyncio.run(_run(prompt, model, params, chat=chat, **settings))


async def _run(prompt: str, model: str, params: SamplingParams, *, chat: bool, **settings: Any) -> int:
    engine = AsyncLLMEngine(model, **settings)
    try:
        messages = [{"role": "user", "content": prompt}]
        outputs = engine.chat(messages, params) if chat else engine.generate(prompt, params)
        shown, error = 0, None
        async for output in outputs:
            text = output.outputs[0].text or ""
            sys.stdout.write(text[shown:])
            sys.stdout.flush()
            shown, error = len(text), output.error_msg
        sys.stdout.write("\n")
        if error is not None:
            print(f"antiphon: {error}", file=sys.stderr)
        return int(error is not None)
    finally:
        await engine.shutdown()
