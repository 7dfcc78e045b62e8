"""Prompts for pairs of texts by a score template, the chat template of a model that scores pairs. Pure.

As in vLLM, such a template gets two messages, with the roles `query` and `document`. The caller renders it: the
tokenizer service in a separate process, the offline API in this process.
"""

from typing import Any

from antiphon.shared.errors import ServiceError
from antiphon.shared.text.codec import Codec
from antiphon.shared.text.truncation import shares

_ROUNDS = 24
"""Maximum number of renderings of a pair that is shortened. Each shortens a text, so one or two are usual."""


class ScorePrompt:
    """The conversion of one pair to token ids.

    Render `messages` and give the text to `token_ids`. If that returns None, the pair was shortened: render again.
    `keep`: maximum number of tokens of the prompt, 0: no limit. Only the two texts are shortened, the longer one first,
    not the template's own text, which the model needs.
    """

    def __init__(self, codec: Codec, pair: tuple[str, str], *, keep: int, add_special_tokens: bool, bos: str) -> None:
        self._codec, self._pair, self._keep = codec, pair, keep
        self._add_special_tokens, self._bos = add_special_tokens, bos
        self._rounds = 0

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The messages of the template."""
        query, document = self._pair
        return [{"role": "query", "content": query}, {"role": "document", "content": document}]

    def token_ids(self, text: str) -> list[int] | None:
        """Returns the ids of the rendered text; None if the pair was shortened and must be rendered again.

        A template that writes the begin-of-sequence token itself gets no second one. Raises ServiceError for a `keep`
        that the template's own text fills.
        """
        special = self._add_special_tokens and not (self._bos and text.startswith(self._bos))
        [ids] = self._codec.encode([text], add_special_tokens=special)
        if not self._keep or len(ids) <= self._keep:
            return ids
        self._shorten(len(ids) - self._keep)
        return None

    def _shorten(self, excess: int) -> None:
        """Removes `excess` tokens from the texts."""
        parts = self._codec.encode(self._pair, add_special_tokens=False)
        total = sum(map(len, parts))
        # A text may occur in the template twice, so that removing `excess` tokens from it could leave nothing.
        room = total - excess if total > excess else total // 2
        self._rounds += 1
        if room < 1 or self._rounds > _ROUNDS:
            reason = f"'truncate_prompt_tokens': {self._keep} tokens leave no room for the texts in the score template."
            raise ServiceError("invalid_value", reason, param="truncate_prompt_tokens")
        kept = shares(len(parts[0]), len(parts[1]), room)
        # A token may be part of a character; it then decodes to U+FFFD.
        first, second = (
            text if count == len(ids) else self._codec.decode(ids[:count]).rstrip("\ufffd")
            for text, ids, count in zip(self._pair, parts, kept, strict=True)
        )
        self._pair = first, second
