"""What `antiphon chat` does: one question from the command line or a pipe, or a conversation on a terminal."""

import argparse
import contextlib
import os
import sys

from antiphon.chat import slash
from antiphon.chat.answers import Answer
from antiphon.chat.conversation import Conversation, conversation_of
from antiphon.chat.prompt import history_file, line_editing
from antiphon.chat.session import Session, print_pieces, stream
from antiphon.client import Client
from antiphon.shared.flags import SettingsError
from antiphon.terminal.exit_codes import Exit
from antiphon.terminal.output import in_json, tell


def run(client: Client, options: argparse.Namespace) -> int:
    """Asks the question of the command line or of a pipe, or else runs a conversation. Returns an exit code.

    Raises SettingsError for flags that cannot be used, and ServerError.
    """
    piped = "" if sys.stdin is None or sys.stdin.isatty() else sys.stdin.read()
    question = "\n\n".join(filter(None, [" ".join(options.question), piped.strip()]))
    if not question and (sys.stdin is None or not sys.stdin.isatty()):
        raise SettingsError("there is no question: write it behind `antiphon chat`, or into the pipe")
    if not question and options.json:
        raise SettingsError("--json is for one question: write it behind `antiphon chat`, or into a pipe")
    conversation = conversation_of(options, "")
    conversation.model = options.model or client.first_model()
    if question:
        conversation.ask(question)
        return _ask_once(client, conversation, as_json=options.json)
    words = [*slash.COMMANDS, *slash.ENDS]
    with line_editing(history_file(os.environ), words):
        return Session(client, conversation, input, slash.run).run()


def _ask_once(client: Client, conversation: Conversation, *, as_json: bool) -> int:
    """Prints the answer, and on a terminal the reasoning before it."""
    answer = Answer()
    with contextlib.closing(stream(client, conversation, answer)) as arriving:
        if as_json:
            for _ in arriving:
                pass
        else:
            print_pieces(arriving, is_terminal=sys.stdout.isatty())
    print(in_json(answer.as_json()) if as_json else "", flush=True)
    if answer.finish_reason == "length":
        tell("the answer is cut off: --max-tokens allows a longer one")
    return Exit.OK
