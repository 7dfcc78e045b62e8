"""Incremental detokenization: returns text token by token, without broken characters or later corrections. Pure.

Both classes give the same guarantee: the concatenated results of `push` and `finish` depend only on the prompt's tail
(its last few tokens) and the output tokens. They do not depend on how the tokens are split over calls, nor on whether a
new object continues with the tokens so far. The text equals the tokenizer library's decoding of tail + output tokens,
without the decoding of the tail at its beginning.

There is one intended exception. If one byte token in a run of byte tokens is invalid, the library's byte-fallback
decoder turns the whole run into U+FFFD, valid characters included. Text that was already returned cannot be changed, so
here the valid characters stay.

The cost of a token does not grow with the output's length.
"""

import codecs
from collections.abc import Sequence

from antiphon.shared import limits
from antiphon.shared.text.vocabulary import Vocabulary

REPLACEMENT = "\ufffd"


class ByteDetokenizer:
    """For tokenizers whose text is the concatenation of their tokens' bytes: decodes these bytes as UTF-8."""

    __slots__ = ("_at_start", "_first_pieces", "_pieces", "_utf8")

    def __init__(
        self,
        vocabulary: Vocabulary,
        prompt_tail: Sequence[int],
        skip_special_tokens: bool,
        shown_special_tokens: tuple[str, ...] = (),
    ) -> None:
        assert vocabulary.rule is not None
        self._pieces: dict[int, bytes] = vocabulary.pieces
        if skip_special_tokens:
            shown = shown_special_tokens
            self._pieces = vocabulary.pieces_with(shown) if shown else vocabulary.visible_pieces
        self._first_pieces = vocabulary.first_pieces
        self._utf8 = codecs.getincrementaldecoder("utf-8")(vocabulary.rule.errors)
        self._at_start = True
        self.push(prompt_tail)

    def push(self, token_ids: Sequence[int]) -> str:
        """Returns the text that is certain after these tokens. Must not be called again after UnknownTokenError."""
        pieces = self._pieces
        found = [pieces[token_id] for token_id in token_ids]
        if self._at_start:
            self._replace_first(token_ids, found)
        return self._utf8.decode(b"".join(found))

    def finish(self) -> str:
        """Returns the text held back so far: an incomplete character at the end, as U+FFFD."""
        return self._utf8.decode(b"", True)

    def _replace_first(self, token_ids: Sequence[int], found: list[bytes]) -> None:
        for index, piece in enumerate(found):
            if piece:
                found[index] = self._first_pieces[token_ids[index]]
                self._at_start = False
                return


class WindowDetokenizer:
    """For all other tokenizers: per token, decodes a short window of tokens again and returns the new text.

    The window `_ids` consists of the tokens that gave the last text, which are the context, and all tokens after them.
    `text` is the decoding of the window:

        text[:_shown]            was already returned, or belongs to the prompt
        text[_shown:]            is new; while the text ends with an incomplete character, it is held back, for at most
                                 `HELD_TOKENS_MAX` tokens
    """

    __slots__ = (
        "_after_special", "_hidden", "_ids", "_num_context", "_num_held", "_shown", "_skip", "_special_ids",
        "_vocabulary",
    )  # fmt: skip

    def __init__(
        self,
        vocabulary: Vocabulary,
        prompt_tail: Sequence[int],
        skip_special_tokens: bool,
        spaces_between_special_tokens: bool = True,
        shown_special_tokens: tuple[str, ...] = (),
    ) -> None:
        self._vocabulary = vocabulary
        self._hidden: frozenset[int] = frozenset()
        if skip_special_tokens and shown_special_tokens:
            # The library skips all special tokens or none, so those that are not shown are left out here.
            self._hidden, skip_special_tokens = vocabulary.hidden_ids(shown_special_tokens), False
        self._skip = skip_special_tokens
        self._special_ids = frozenset[int]() if spaces_between_special_tokens else vocabulary.special_ids
        """Tokens before which no space is written if another of them precedes."""
        self._after_special = bool(prompt_tail) and prompt_tail[-1] in self._special_ids
        self._ids = list(prompt_tail)
        self._num_context = len(self._ids)
        self._num_held = 0
        self._shown = len(self._text().rstrip(REPLACEMENT))

    def push(self, token_ids: Sequence[int]) -> str:
        """See ByteDetokenizer."""
        return "".join([self._push_one(token_id) for token_id in token_ids])

    def finish(self) -> str:
        """See ByteDetokenizer."""
        text = self._text()[self._shown :]
        self._shown += len(text)
        return text

    def _push_one(self, token_id: int) -> str:
        special = token_id in self._special_ids
        joined, self._after_special = special and self._after_special, special
        self._ids.append(token_id)
        text = self._text()
        if text.endswith(REPLACEMENT) and self._num_held < limits.HELD_TOKENS_MAX:
            self._num_held += 1
            return ""
        self._num_held = 0
        new = text[self._shown :]
        if new:
            self._move_window(len(text))
        return new.removeprefix(" ") if joined else new

    def _move_window(self, shown: int) -> None:
        """Drops the old context.

        The tokens that produced new text become the context, if they have text by themselves.
        """
        latest = self._ids[self._num_context :]
        text = self._decoded(latest)
        if text:
            self._ids, self._shown = latest, len(text)
        else:
            self._shown = shown
        self._num_context = len(self._ids)

    def _text(self) -> str:
        return self._decoded(self._ids)

    def _decoded(self, token_ids: Sequence[int]) -> str:
        if self._hidden:
            token_ids = [token_id for token_id in token_ids if token_id not in self._hidden]
        return self._vocabulary.decode(token_ids, self._skip)


Detokenizer = ByteDetokenizer | WindowDetokenizer


def start_detokenizer(
    vocabulary: Vocabulary,
    prompt_tail: Sequence[int],
    skip_special_tokens: bool,
    spaces_between_special_tokens: bool = True,
    shown_special_tokens: tuple[str, ...] = (),
) -> Detokenizer:
    """Returns a detokenizer for the text after `prompt_tail`, the last few prompt tokens. Raises UnknownTokenError.

    Without `spaces_between_special_tokens` there is no space between special tokens that follow each other. Only the
    tokenizers of WindowDetokenizer write such spaces. With `skip_special_tokens` the text has no special tokens but
    those with the texts `shown_special_tokens`.
    """
    if vocabulary.rule is not None:
        return ByteDetokenizer(vocabulary, prompt_tail, skip_special_tokens, shown_special_tokens)
    return WindowDetokenizer(
        vocabulary, prompt_tail, skip_special_tokens, spaces_between_special_tokens, shown_special_tokens
    )
