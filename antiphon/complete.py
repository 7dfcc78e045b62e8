"""`antiphon complete PROMPT`: loads a model in this process and prints the continuation of a text piece by piece."""

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from antiphon import AsyncLLMEngine, SamplingParams
from antiphon.chat import image_of
from antiphon.shared.request.data_urls import data_url


def run(
    prompt: str, model: str, params: SamplingParams, *, chat: bool, images: Sequence[Path] = (), **settings: Any
) -> int:
    """Prints the generated text to standard output. Returns 0, or 1 if generation failed.

    With `chat`, `prompt` is a user message to answer instead of a text to continue. `images`: the images of the
    message, placed before its text; without `chat`, the prompt must contain the model's image token once per image.

    Raises ValueError for settings, a model or images that cannot be used.
    """
    files = [image_of(path) for path in images]
    return asyncio.run(_run(prompt, model, params, chat=chat, files=files, **settings))


async def _run(
    prompt: str, model: str, params: SamplingParams, *, chat: bool, files: Sequence[bytes], **settings: Any
) -> int:
    engine = AsyncLLMEngine(model, enable_mm=bool(files), **settings)
    try:
        if chat:
            parts = [{"type": "image_url", "image_url": {"url": data_url(one)}} for one in files]
            content = [*parts, {"type": "text", "text": prompt}] if parts else prompt
            outputs = engine.chat([{"role": "user", "content": content}], params)
        else:
            asked = {"prompt": prompt, "multi_modal_data": {"image": list(files)}}
            outputs = engine.generate(asked if files else prompt, params)
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
