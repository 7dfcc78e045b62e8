"""The pieces of a streamed answer, and its figures: tokens, speed, time to the first token."""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

RATE_S = 0.1
"""Shortest time in which a rate is measured, seconds: several tokens may arrive at once."""


class Piece(NamedTuple):
    """New text of an answer.

    `is_reasoning`: it is part of the model's reasoning, which is shown but not sent back.
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


@dataclass(kw_only=True)
class Answer:
    """An answer, as far as it has arrived. Times are seconds of a monotonic clock.

    `usage`: the server's count of tokens, empty if it sends none. `is_stopped`: the user has ended it.
    """

    clock: Callable[[], float] = time.monotonic
    content: str = ""
    reasoning: str = ""
    finish_reason: str = ""
    model: str = ""
    usage: dict[str, Any] = field(default_factory=dict[str, Any])
    is_stopped: bool = False
    _began: float = 0.0
    _first: float | None = None
    _ended: float = 0.0

    def read(self, chunks: Iterable[dict[str, Any]]) -> Iterator[Piece]:
        """Yields the pieces of an answer while they arrive, and keeps them."""
        self._began = self._ended = self.clock()
        for piece in pieces(self._noted(chunks)):
            self._ended = self.clock()
            self._first = self._ended if self._first is None else self._first
            if piece.is_reasoning:
                self.reasoning += piece.text
            else:
                self.content += piece.text
            yield piece

    def _noted(self, chunks: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        for chunk in chunks:
            self.usage = chunk.get("usage") or self.usage
            self.model = chunk.get("model") or self.model
            for choice in chunk.get("choices") or ():
                self.finish_reason = choice.get("finish_reason") or self.finish_reason
            yield chunk

    @property
    def message(self) -> dict[str, Any]:
        """The message that continues the conversation."""
        return {"role": "assistant", "content": self.content}

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer; 0 if the server does not count them."""
        return int(self.usage.get("completion_tokens") or 0)

    @property
    def context_tokens(self) -> int:
        """Tokens of the conversation up to this answer; 0 if the server does not count them."""
        return int(self.usage.get("prompt_tokens") or 0) + self.num_tokens

    @property
    def first_token_s(self) -> float | None:
        """Seconds from the request to the first text."""
        return None if self._first is None else self._first - self._began

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens a second after the first text; None if the rest came too soon after it for a rate."""
        if self._first is None or self._ended - self._first < RATE_S:
            return None
        return (self.num_tokens - 1) / (self._ended - self._first)

    def figures(self) -> str:
        """Returns the figures as a line, without those that are not known."""
        first, rate = self.first_token_s, self.tokens_per_s
        parts = [
            f"{self.num_tokens} tokens" if self.num_tokens else "",
            f"{rate:.1f} tokens/s" if rate else "",
            f"first after {first:.2f} s" if first is not None else "",
            {"length": "cut off: the longest answer is reached (/set max_tokens N)"}.get(self.finish_reason, ""),
            "stopped" if self.is_stopped else "",
        ]
        return " · ".join(filter(None, parts))

    def as_json(self) -> dict[str, Any]:
        """Returns the message with what is known about it."""
        reasoning = {"reasoning": self.reasoning} if self.reasoning else {}
        times = {"first_token_s": self.first_token_s, "tokens_per_s": self.tokens_per_s}
        facts = {"finish_reason": self.finish_reason or None, "model": self.model, "usage": self.usage, "times": times}
        return {**self.message, **reasoning, **facts}
