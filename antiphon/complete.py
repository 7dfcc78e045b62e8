"""`antiphon complete PROMPT`: loads a model in this process and prints the continuation of a text piece by piece."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from antiphon import AsyncLLMEngine, SamplingParams
from antiphon.chat.conversation import image_of
from antiphon.shared.request.data_urls import data_url
from antiphon.shared.request.outputs import RequestOutput
from antiphon.terminal.exit_codes import CommandError
from antiphon.terminal.output import in_json


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A text to continue, or with `chat` a user message to answer.

    `images`: the images of the message, placed before its text; without `chat`, `text` must contain the model's image
    token once per image.
    """

    text: str
    chat: bool = False
    images: Sequence[Path] = ()


def run(prompt: Prompt, model: str, params: SamplingParams, *, as_json: bool = False, **settings: Any) -> int:
    """Prints the generated text to standard output piece by piece, or with `as_json` the whole output as JSON.

    Returns 0, or 1 if generation failed. Raises ValueError for settings, a model or images that cannot be used.
    """
    files = [image_of(path) for path in prompt.images]
    output = asyncio.run(_run(prompt, files, model, params, shows=not as_json, **settings))
    if output.error_msg is not None:
        raise CommandError(output.error_msg)
    if as_json:
        one, num_prompt = output.outputs[0], len(output.prompt_token_ids or ())
        usage = {"prompt_tokens": num_prompt, "completion_tokens": len(one.token_ids)}
        print(in_json({"text": one.text or "", "finish_reason": one.finish_reason, "usage": usage}), flush=True)
    return 0


async def _run(
    prompt: Prompt, files: Sequence[bytes], model: str, params: SamplingParams, *, shows: bool, **settings: Any
) -> RequestOutput:
    engine = AsyncLLMEngine(model, enable_mm=bool(files), **settings)
    try:
        if prompt.chat:
            parts = [{"type": "image_url", "image_url": {"url": data_url(one)}} for one in files]
            content = [*parts, {"type": "text", "text": prompt.text}] if parts else prompt.text
            outputs = engine.chat([{"role": "user", "content": content}], params)
        else:
            asked = {"prompt": prompt.text, "multi_modal_data": {"image": list(files)}}
            outputs = engine.generate(asked if files else prompt.text, params)
        shown, last = 0, None
        async for last in outputs:
            text = last.outputs[0].text or ""
            if shows:
                print(text[shown:], end="", flush=True)
            shown = len(text)
        if shows:
            print(flush=True)
        assert last is not None
        return last
    finally:
        await engine.shutdown()
