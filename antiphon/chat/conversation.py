"""A conversation: its messages and settings, the body of a request, and its file. Reads and writes only named files."""

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from antiphon.shared.flags import SettingsError
from antiphon.shared.request.data_urls import data_url

Message = dict[str, Any]


def _whole_number(text: str) -> int:
    return int(text)


def _words(text: str) -> list[str]:
    return [text]


def response_format(text: str) -> Any:
    """Returns the form of answers that a JSON object or a file with one describes. Raises ValueError."""
    try:
        given = text if text.lstrip().startswith("{") else Path(text).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{text} is neither a JSON object nor a readable file ({error.strerror})") from None
    try:
        return json.loads(given)
    except ValueError as error:
        raise ValueError(f"{text} is no JSON: {error}") from None


SETTINGS: dict[str, Callable[[str], Any]] = {
    "max_tokens": _whole_number,
    "temperature": float,
    "top_p": float,
    "top_k": _whole_number,
    "min_p": float,
    "seed": _whole_number,
    "stop": _words,
    "response_format": response_format,
}
"""The settings of `/set`, which are fields of the request, and how their values are read."""


@dataclass(kw_only=True)
class Conversation:
    """The messages so far, with the settings of the next request. `images`: parts of the next message."""

    model: str
    messages: list[Message] = field(default_factory=list[Message])
    settings: dict[str, Any] = field(default_factory=dict[str, Any])
    images: list[Message] = field(default_factory=list[Message])

    @property
    def system(self) -> str:
        """The system message; empty without one."""
        first = self.messages[:1]
        return str(first[0]["content"]) if first and first[0]["role"] == "system" else ""

    def set_system(self, text: str) -> None:
        """Replaces the system message; an empty text removes it."""
        rest = self.messages[1:] if self.system else self.messages
        self.messages = [{"role": "system", "content": text}, *rest] if text else rest

    def clear(self) -> None:
        """Forgets all messages but the system message."""
        self.messages = self.messages[: 1 if self.system else 0]
        self.images = []

    def ask(self, text: str) -> None:
        """Adds a message of the user, with the images that wait for it."""
        content = [*self.images, {"type": "text", "text": text}] if self.images else text
        self.messages.append({"role": "user", "content": content})
        self.images = []

    def undo(self) -> Message | None:
        """Removes the last question with its answer, and returns the question; None if there is none."""
        for index in reversed(range(len(self.messages))):
            if self.messages[index]["role"] == "user":
                question = self.messages[index]
                del self.messages[index:]
                return question
        return None

    def change(self, name: str, text: str) -> None:
        """Sets a setting; `none` removes it. Raises ValueError."""
        name = name.replace("-", "_")
        if name not in SETTINGS:
            raise ValueError(f"there is no setting {name}; there are {', '.join(SETTINGS)}")
        if text.lower() == "none":
            self.settings.pop(name, None)
            return
        try:
            self.settings[name] = SETTINGS[name](text)
        except ValueError as error:
            kind = {float: "a number", _whole_number: "a whole number"}.get(SETTINGS[name])
            raise ValueError(f"{name}: {text} is not {kind}" if kind else f"{name}: {error}") from None

    def body(self) -> dict[str, Any]:
        """Returns the body of the next request."""
        usage = {"stream_options": {"include_usage": True}}
        return {"model": self.model, **self.settings, **usage, "messages": self.messages}

    def save(self, path: Path) -> None:
        """Writes the conversation to a file. Raises OSError."""
        whole = {"model": self.model, "settings": self.settings, "messages": self.messages}
        path.write_text(json.dumps(whole, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

    def load(self, path: Path) -> None:
        """Replaces messages and settings by those of a file, which may also be a list of messages.

        The model stays. Raises OSError, and ValueError for another file.
        """
        found: Any = json.loads(path.read_text(encoding="utf-8"))
        messages: Any = cast(dict[str, Any], found).get("messages") if isinstance(found, dict) else found
        if not isinstance(messages, list) or not all(_is_message(one) for one in cast(list[Any], messages)):
            raise ValueError("it has no list of messages with role and content")
        settings: Any = cast(dict[str, Any], found).get("settings", {}) if isinstance(found, dict) else self.settings
        if not isinstance(settings, dict) or not settings.keys() <= SETTINGS.keys():
            raise ValueError(f"its settings are not among {', '.join(SETTINGS)}")
        self.messages, self.settings = cast(list[Message], messages), dict(cast(dict[str, Any], settings))


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(cast(Message, value).get("role"), str) and "content" in value


def conversation_of(options: argparse.Namespace, model: str) -> Conversation:
    """Returns the conversation that the flags of `antiphon chat` begin. Raises SettingsError."""
    made = Conversation(model=model, images=[image_part(path) for path in options.image or ()])
    names = [name for name in SETTINGS if name != "response_format"]
    made.settings = {name: value for name in names if (value := getattr(options, name)) is not None}
    if options.response_format is not None:
        try:
            made.settings["response_format"] = response_format(options.response_format)
        except ValueError as error:
            raise SettingsError(f"--response-format: {error}") from None
    made.set_system(options.system or "")
    return made


def image_part(path: Path) -> Message:
    """Returns the part of a message that has an image. Raises SettingsError if the file cannot be read."""
    return {"type": "image_url", "image_url": {"url": data_url(image_of(path))}}


def image_of(path: Path) -> bytes:
    """Returns the content of an image file. Raises SettingsError if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise SettingsError(f"--image: {path} cannot be read: {error.strerror}") from None
