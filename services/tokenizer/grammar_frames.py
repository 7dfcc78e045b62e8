"""Messages between the tokenizer and the process that checks grammars, sent as frames (`sandbox`)."""

import msgspec

from antiphon.shared.parameters.grammar import Grammar


class GrammarJob(msgspec.Struct, frozen=True, array_like=True):
    """One grammar to check. Answered by `GrammarVerdict`. `wall_s`: time limit in seconds."""

    grammar: Grammar
    wall_s: float


class GrammarVerdict(msgspec.Struct, frozen=True, array_like=True):
    """Why the grammar cannot be used, as a message for the user; empty if it can.

    `place`: the place of the request's schema that is wrong; empty if none is.
    """

    error: str = ""
    place: str = ""
