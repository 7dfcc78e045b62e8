"""Incremental detokenization: tokens in, text out, never a broken character and never text that later changes. Pure.

Both classes promise the same. The deltas of `push` and `finish`, joined, are a function of the prompt's tail and the
tokens alone: however the tokens are split over calls, and wherever a new object takes over with the tokens so far, the
text is the same. It equals what the tokenizer library decodes from tail + tokens, behind what it decodes from the tail.

One exception, on purpose: a byte-fallback decoder of the library turns a whole run of byte tokens into U+FFFD when one
of them is wrong, good characters included. Text that was shown cannot be taken back, so here the good ones stay.

Cost does not grow with the output's length.
"""

import codecs
from collections.abc import Sequence
from typing import Protocol

from shared import limits
from shared.text.vocabulary import Vocabulary

REPLACEMENT = "\ufffd"


class Detokenizer(Protocol):
    """One sequence's text."""

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens make certain. Raises UnknownTokenError and then takes no more."""
        ...

    def finish(self) -> str:
        """What was held back: the broken end of the text, as U+FFFD."""
        ...


def start_detokenizer(vocabulary: Vocabulary, prompt_tail: Sequence[int], skip_special_tokens: bool) -> Detokenizer:
    """A detokenizer for the text behind `prompt_tail`, the prompt's last few tokens. Raises UnknownTokenError."""
    kind = WindowDetokenizer if vocabulary.rule is None else ByteDetokenizer
    return kind(vocabulary, prompt_tail, skip_special_tokens)


class ByteDetokenizer:
    """For decoders whose text is the sum of their tokens' bytes: an incremental UTF-8 reading of them."""

    __slots__ = ("_at_start", "_first_pieces", "_pieces", "_utf8")

    def __init__(self, vocabulary: Vocabulary, prompt_tail: Sequence[int], skip_special_tokens: bool) -> None:
        assert vocabulary.rule is not None
        self._pieces = vocabulary.visible_pieces if skip_special_tokens else vocabulary.pieces
        self._first_pieces = vocabulary.first_pieces
        self._utf8 = codecs.getincrementaldecoder("utf-8")(vocabulary.rule.errors)
        self._at_start = True
        self.push(prompt_tail)

    def push(self, token_ids: Sequence[int]) -> str:
        """See Detokenizer."""
        pieces = self._pieces
        found = [pieces[token_id] for token_id in token_ids]
        if self._at_start:
            self._replace_first(token_ids, found)
        return self._utf8.decode(b"".join(found))

    def finish(self) -> str:
        """See Detokenizer."""
        return self._utf8.decode(b"", True)

    def _replace_first(self, token_ids: Sequence[int], found: list[bytes]) -> None:
        for index, piece in enumerate(found):
            if piece:
                found[index] = self._first_pieces[token_ids[index]]
                self._at_start = False
                return


class WindowDetokenizer:
    """For any other decoder: decodes a short window of tokens again and shows what is new in it.

    The window is the tokens that gave the last text (context for joining) and those after them:

        [0, ..)                  ids: decoded at each token
        text[:_shown]            is out
        text[_shown:]            is new, unless the text ends with a broken character, which is held back
    """

    __slots__ = ("_ids", "_num_context", "_num_held", "_shown", "_skip", "_vocabulary")

    def __init__(self, vocabulary: Vocabulary, prompt_tail: Sequence[int], skip_special_tokens: bool) -> None:
        self._vocabulary = vocabulary
        self._skip = skip_special_tokens
        self._ids = list(prompt_tail)
        self._num_context = len(self._ids)
        self._num_held = 0
        self._shown = len(self._text().rstrip(REPLACEMENT))

    def push(self, token_ids: Sequence[int]) -> str:
        """See Detokenizer."""
        return "".join([self._push_one(token_id) for token_id in token_ids])

    def finish(self) -> str:
        """See Detokenizer."""
        text = self._text()[self._shown :]
        self._shown += len(text)
        return text

    def _push_one(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._text()
        if text.endswith(REPLACEMENT) and self._num_held < limits.HELD_TOKENS_MAX:
            self._num_held += 1
            return ""
        self._num_held = 0
        new = text[self._shown :]
        if new:
            self._move_window(len(text))
        return new

    def _move_window(self, shown: int) -> None:
        """Drops the old context; the tokens that gave new text become the context, if they have text of their own."""
        latest = self._ids[self._num_context :]
        text = self._vocabulary.decode(latest, self._skip)
        if text:
            self._ids, self._shown = latest, len(text)
        else:
            self._shown = shown
        self._num_context = len(self._ids)

    def _text(self) -> str:
        return self._vocabulary.decode(self._ids, self._skip)
