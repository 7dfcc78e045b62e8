"""The grammar that a sequence's output must follow, in the form of bus messages: its kind and its text.

The request library (`shared/request/structured.py`) makes grammars from request fields.
`shared/text/grammars/constraint.py` compiles them; tokenizers check them before a request is accepted, and engines
apply them.
"""

import re
from typing import Literal

import msgspec

from antiphon.shared import limits

GrammarKind = Literal["json", "json_object", "regex", "choice", "grammar", "structural_tag", "tagged_text"]
SUBJECT = "The grammar or schema"
"""First words of the message about an unusable grammar."""
_TEXT_IN_JSON = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"')


class Grammar(msgspec.Struct, frozen=True, array_like=True):
    """A grammar. Equal grammars compile to the same automaton, independent of the request field.

    | kind             | `text`                                                                                |
    |------------------|---------------------------------------------------------------------------------------|
    | `json`           | a JSON Schema                                                                         |
    | `json_object`    | empty: any JSON object                                                                |
    | `regex`          | a regular expression that the whole output matches                                    |
    | `choice`         | a JSON list of strings, one of which is the output                                    |
    | `grammar`        | a context-free grammar in Lark's or GBNF's notation                                   |
    | `structural_tag` | `{"structures": [{"begin", "schema", "end"}], "triggers": [...]}`: free text in which each |
    |                  | trigger begins a tag whose content follows the schema                                 |
    | `tagged_text`    | a `tagged_text.TaggedText` as JSON: tags whose content need not be JSON             |
    """

    kind: GrammarKind
    text: str = ""
    whitespace: str = ""
    """Regular expression of the whitespace between JSON tokens; empty: the default of
    `antiphon.shared.text.grammars.constraint`."""
    compact: bool = False
    """JSON without whitespace between its tokens."""

    @property
    def excess(self) -> str:
        """What is wrong with its length, as the rest of a sentence; empty if nothing is."""
        size, most = len(self.text.encode()) + len(self.whitespace.encode()), limits.GRAMMAR_BYTES_MAX
        if size <= most:
            return ""
        if self.kind != "json" or size > limits.SCHEMA_BYTES_MAX:
            return f"must not be longer than {limits.SCHEMA_BYTES_MAX if self.kind == 'json' else most} bytes"
        texts = [f'"{self.whitespace}"', *_TEXT_IN_JSON.findall(self.text)]
        return f"must not have a text longer than {most} bytes" if max(map(len, texts)) > most else ""

    @property
    def is_free(self) -> bool:
        """Whether output that follows the grammar can always continue, as free text."""
        return self.kind in ("structural_tag", "tagged_text")
