"""Images for a scripted backend, and what it was asked with."""

import base64
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from antiphon.services.gateway.path.generation import GenerationRequest
from antiphon.shared.messages import ChatMessage
from tests.integration.edge import CARD, ScriptedBackend

EYE = replace(CARD, takes_images=True)
"""A model that takes images."""
ONE, TWO = b"\x89PNG one" * 300, b"\xff\xd8\xff two" * 300
URL = "https://example.org/two.jpg"
"""Where TWO is."""


def data_url(file: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{in_base64(file)}"


def in_base64(file: bytes) -> str:
    return base64.b64encode(file).decode()


def eye(**options: Any) -> ScriptedBackend:
    return ScriptedBackend([EYE], remote={URL: TWO}, **options)


def seen(request: GenerationRequest) -> list[tuple[str, Any]]:
    """The conversation of a request, with the files of images, or their URLs, in their places."""
    images = iter([image.file or image.url for image in request.inputs.images])
    found = [(message.role, _content(message, images)) for message in request.inputs.messages]
    assert next(images, None) is None
    return found


def _content(message: ChatMessage, images: Iterator[bytes | str]) -> Any:
    fields = json.loads(message.fields or b"{}")
    return [part.get("text") or next(images) for part in fields.get("content", ())] or message.content
