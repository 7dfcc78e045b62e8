"""Breaks special tokens in texts of users, so that no text can begin or end a turn of a conversation. Pure.

A chat template writes the tokens that separate turns as text, between the texts of the messages. In the rendered text
the tokenizer cannot tell one from the other. So they are broken before: a zero-width space behind its first character
makes a special token ordinary text. Called by the tokenizer with `--escape-special-tokens`.
"""

import re
from collections.abc import Collection
from typing import Any, cast

_BREAK = "\u200b"


class SpecialTokens:
    """The special tokens of a tokenizer, by their texts. Tokens of a single character are left as they are."""

    def __init__(self, texts: Collection[str]) -> None:
        longest_first = sorted((text for text in texts if len(text) > 1), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._beginnings = {text[:length] for text in longest_first for length in range(1, len(text))}
        self._longest = len(longest_first[0]) if longest_first else 0

    def broken(self, value: Any) -> Any:
        """Returns a JSON value in whose texts, put together in any way, there is no special token."""
        if isinstance(value, str):
            return self._broken_text(value)
        if isinstance(value, list):
            return list(map(self.broken, cast(list[Any], value)))
        if isinstance(value, dict):
            return {self.broken(key): self.broken(one) for key, one in cast(dict[Any, Any], value).items()}
        return value

    def _broken_text(self, text: str) -> str:
        while self._pattern.search(text):
            text = self._pattern.sub(lambda found: _broken_at(found[0], 1), text)
        # The template may remove the space at the end, and put another text of the user directly behind this one.
        end = text.rstrip()
        space = text[len(end) :]
        for length in range(min(self._longest, len(end)), 0, -1):
            if end[-length:] in self._beginnings:
                end = _broken_at(end, len(end) - length + 1)
        return end + space


def _broken_at(text: str, place: int) -> str:
    return text[:place] + _BREAK + text[place:]
