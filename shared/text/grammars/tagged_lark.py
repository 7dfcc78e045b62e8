"""Converts free text with tagged parts (`tagged_text`) to the Lark notation of the llguidance library. Pure.

The free text is a regular expression that matches everything. A lazy lexeme of text and a marker ends at the first
marker, so a marker in free text is always followed by its part. If a mark is a special token of the vocabulary, it
may be written as this token or spelled in other tokens; both begin the part. All other special tokens may stand in the
free text, but not inside a mark: detokenizers skip special tokens, so the pieces of a mark before and after a special
token would become one mark.
"""

import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from antiphon.shared.parameters.tagged_text import (
    Chain,
    Choice,
    Json,
    Literal,
    Name,
    Piece,
    Raw,
    Repeat,
    Some,
    Space,
    TaggedText,
)

SPACE = r"[ \n\t\r]{0,20}"
"""Whitespace between the pieces of a part. Bounded, so that a model cannot write endless whitespace."""
DENSE = "[ \\n]?"
"""Whitespace in JSON if the whole output must be a call, without free text: as much as models write in calls. If more
were allowed, a small model that must call a tool which does not fit the request may fill its output with whitespace."""
_ANY = r"(.|\n)"
_BLANK = r"[\s\x1c-\x1f]"
"""Whitespace of Python's regular expressions, which parsers skip before a part."""
_LITERAL_IN_CLASS = re.compile(r"([\]\[\\^&~/-])")


def lark_grammar(tagged: TaggedText, special_tokens: Mapping[str, int]) -> str:
    """Returns the grammar. `special_tokens`: ids of the special tokens, without those that end an output, by text."""
    return _Grammar(tagged, special_tokens).text()


class _Grammar:
    def __init__(self, tagged: TaggedText, special_tokens: Mapping[str, int]) -> None:
        self._tagged = tagged
        self._special = special_tokens
        self._lines: list[str] = ["%llguidance {}", "start: text"]
        self._num_rules = 0
        longest_first = sorted(special_tokens, key=len, reverse=True)
        self._specials = re.compile(f"({'|'.join(map(re.escape, longest_first))})") if special_tokens else None

    def text(self) -> str:
        """Returns the whole grammar."""
        self._lines += [f"SPACE: /{SPACE}/", "NAME: /[A-Za-z_][A-Za-z0-9_]*/"]
        if not self._tagged.is_free:
            assert self._tagged.opening is not None
            self._lines.append(f"text: SPACE {self._piece(self._tagged.opening)} SPACE")
            return "\n".join(self._lines)
        tags = self._tagged.tags
        contents: dict[str, list[str]] = {tag.mark: [] for tag in tags}
        for tag in tags:
            contents[tag.mark].append(self._piece(tag.content))
        parts = [self._marked(mark, f"({' | '.join(each)})") for mark, each in contents.items()]
        if self._tagged.opening is not None:
            parts.append(f"SPACE {self._piece(self._tagged.opening)}")
        parts += self._hidden(contents)
        self._lines += [
            f"text: LAST | ({' | '.join(parts)}) text",
            f"LAST: {self._free()}",
            f"FREE: {self._free()}",
        ]
        return "\n".join(self._lines)

    def _free(self) -> str:
        """Returns the expression of free text."""
        barred = _LITERAL_IN_CLASS.sub(r"\\\1", self._tagged.not_first)
        if not barred:
            return f"/{_ANY}*/"
        return rf"/{_BLANK}*([^\s\x1c-\x1f{barred}]{_ANY}*)?/"

    def _marked(self, mark: str, content: str) -> str:
        """Returns a part with the free text before it: its mark is spelled, or a special token."""
        name = self._rule("mark", f"FREE {json.dumps(mark)}", lazy=True)
        if mark not in self._special:
            return f"{name} {content}"
        return f"({name} | FREE <[{self._special[mark]}]>) {content}"

    def _hidden(self, marks: Collection[str]) -> list[str]:
        """Returns free text that ends with a special token other than a marker; nothing if there is no such token."""
        others = sorted(token_id for text, token_id in self._special.items() if text not in marks)
        if not others:
            return []
        beginnings = sorted({mark[:end] for mark in marks for end in range(1, len(mark))})
        begun = f"/{_ANY}*({'|'.join(map(_escaped, beginnings))})/"
        free = self._terminal("SHOWN", f"FREE & ~{begun}" if beginnings else "FREE")
        return [f"{free} <[{_ranges(others)}]>"]

    def _piece(self, piece: Piece) -> str:
        """Returns the expression of a piece; may add rules."""
        match piece:
            case Literal(text):
                return self._literal(text)
            case Space():
                return "SPACE"
            case Name():
                return "NAME"
            case Json(schema):
                return self._rule("json", f"%json {json.dumps(self._with_whitespace(schema))}")
            case Raw():
                return self._raw(piece)
            case Choice(pieces):
                return f"({' | '.join(map(self._piece, pieces))})"
            case Chain(pieces):
                return " ".join(map(self._piece, pieces)) if pieces else '""'
            case Repeat(repeated, at_most_once):
                return f"({self._piece(repeated)}){'?' if at_most_once else '*'}"
            case Some(pieces):
                return self._some(list(map(self._piece, pieces)))

    def _some(self, expressions: list[str]) -> str:
        """Returns a rule for a list of at least one of the expressions, in their order."""
        rest = self._rule("some", expressions[-1])
        for expression in reversed(expressions[:-1]):
            rest = self._rule("some", f'{expression} ("," SPACE {rest})? | {rest}')
        return rest

    def _with_whitespace(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        pattern = SPACE if self._tagged.is_free else DENSE
        return {**schema, "x-guidance": {"whitespace_pattern": pattern}}

    def _literal(self, text: str) -> str:
        parts = self._specials.split(text) if self._specials is not None else [text]
        return " ".join(map(self._spelled, filter(None, parts))) or '""'

    def _spelled(self, text: str) -> str:
        """Returns the grammar's expression for a text without special tokens in it, or for one special token.

        A special token may occur as itself or be spelled with ordinary tokens.
        """
        quoted = json.dumps(text)
        return f"({quoted} | <[{self._special[text]}]>)" if text in self._special else quoted

    def _raw(self, raw: Raw) -> str:
        most = "" if raw.max_chars is None else raw.max_chars
        closed = f"/{_ANY}*{_escaped(raw.closing)}{_ANY}*/"
        body = self._terminal("RAW", f"/{_ANY}{{{raw.min_chars},{most}}}/ & ~{closed}")
        end = self._rule("raw", f"{body} {json.dumps(raw.before + raw.closing)}", lazy=True)
        found = self._specials.search(raw.closing) if self._specials is not None else None
        if found is None:
            return end
        before = raw.before + raw.closing[: found.start()]
        if before:
            body = self._terminal("RAW", f"{body} {json.dumps(before)}")
        after = raw.closing[found.end() :]
        rest = f" {self._literal(after)}" if after else ""
        return f"({end} | {body} <[{self._special[found[0]]}]>{rest})"

    def _rule(self, name: str, expression: str, *, lazy: bool = False) -> str:
        self._num_rules += 1
        name = f"{name}_{self._num_rules}"
        self._lines.append(f"{name}{'[lazy]' if lazy else ''}: {expression}")
        return name

    def _terminal(self, name: str, expression: str) -> str:
        self._num_rules += 1
        name = f"{name}_{self._num_rules}"
        self._lines.append(f"{name}: {expression}")
        return name


def _escaped(text: str) -> str:
    """Returns a regular expression between slashes that matches this text."""
    return re.escape(text).replace("/", r"\/")


def _ranges(ids: list[int]) -> str:
    """Returns sorted token ids as ranges: `1-3,7`."""
    found: list[list[int]] = []
    for one in ids:
        if found and one == found[-1][1] + 1:
            found[-1][1] = one
        else:
            found.append([one, one])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in found)
