"""`antiphon chat`: a conversation in the terminal with any server that implements OpenAI's chat completions API.

Answers are always streamed. If the connection breaks, the answer continues on a new connection, provided that the
server can resume streams. The whole conversation is kept and sent with each request.
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from antiphon.client import Client, ServerError
from antiphon.shared.flags import SettingsError
from antiphon.shared.request.data_urls import data_url


class Piece(NamedTuple):
    """New text of an answer.

    `is_reasoning`: it is part of the model's reasoning, which is printed but not sent back.
    """

    text: str
    is_reasoning: bool = False


def pieces(chunks: Iterable[dict[str, Any]]) -> Iterator[Piece]:
    """Yields the pieces of text in the chunks of an answer."""
    for chunk in chunks:
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            if text := delta.get("reasoning") or delta.get("reasoning_content"):
                yield Piece(text, is_reasoning=True)
            if text := delta.get("content"):
                yield Piece(text)


def run(client: Client, options: argparse.Namespace, read: Callable[[str], str] = input) -> int:
    """Runs the conversation until the end of the input or Ctrl-C. Returns 0, or 1 after an error of the server.

    The images in `options.image` are sent with the first message. Raises SettingsError if one cannot be read.
    """
    images = [{"type": "image_url", "image_url": {"url": data_url(image_of(path))}} for path in options.image or ()]
    messages: list[dict[str, Any]] = [{"role": "system", "content": options.system}] if options.system else []
    try:
        body = {
            "model": options.model or client.first_model(),
            "max_tokens": options.max_tokens,
            "temperature": options.temperature,
            "top_p": options.top_p,
        }
        while (text := _ask_user(read)) is not None:
            content = [*images, {"type": "text", "text": text}] if images else text
            messages.append({"role": "user", "content": content})
            images = []
            messages.append({"role": "assistant", "content": _answer(client, {**body, "messages": messages})})
    except ServerError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print()
    return 0


def image_of(path: Path) -> bytes:
    """Returns the content of an image file. Raises SettingsError if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise SettingsError(f"--image: {path} cannot be read: {error.strerror}") from None


def _ask_user(read: Callable[[str], str]) -> str | None:
    try:
        return read("User: ")
    except EOFError:
        print()
        return None


def _answer(client: Client, body: dict[str, Any]) -> str:
    print("Assistant: ", end="", flush=True)
    answer, reasoning = "", False
    for piece in pieces(client.stream("/v1/chat/completions", body)):
        if piece.is_reasoning != reasoning:
            reasoning = piece.is_reasoning
            print("[reasoning] " if reasoning else "\n[answer] ", end="")
        print(piece.text, end="", flush=True)
        answer += "" if reasoning else piece.text
    print()
    return answer
