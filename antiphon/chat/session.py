"""A conversation in the terminal: asks, prints answers, and goes on after errors and Ctrl-C.

Ctrl-C ends the answer that runs; what has arrived of it stays in the conversation. At the prompt the second Ctrl-C ends
the session, as Ctrl-D does.
"""

import contextlib
import sys
from collections.abc import Callable, Generator, Iterable

from antiphon.chat.answers import Answer, Piece
from antiphon.chat.conversation import Conversation, Message
from antiphon.chat.prompt import Read, read_message
from antiphon.client import Client
from antiphon.shared.flags import SettingsError
from antiphon.terminal.exit_codes import Exit
from antiphon.terminal.output import harmless, styled

PATH = "/v1/chat/completions"
Command = Callable[["Session", str], bool]
"""Runs a command with its arguments. Returns whether the session goes on."""


def stream(client: Client, conversation: Conversation, answer: Answer) -> Generator[Piece]:
    """Yields the pieces of the answer to a conversation. Raises ServerError."""
    yield from answer.read(client.stream(PATH, conversation.body()))


def print_pieces(pieces: Iterable[Piece], *, is_terminal: bool) -> None:
    """Prints an answer while it arrives. A terminal gets the reasoning, too, and nothing that could change it."""
    is_reasoning = False
    for piece in pieces:
        if piece.is_reasoning and not is_terminal:
            continue
        if is_reasoning and not piece.is_reasoning:
            print("\n")
        is_reasoning = piece.is_reasoning
        text = harmless(piece.text) if is_terminal else piece.text
        print(styled(text, "dim") if is_reasoning else text, end="", flush=True)


class Session:
    """One session. `run_command`: what a line that begins with `/` does."""

    def __init__(self, client: Client, conversation: Conversation, read: Read, run_command: Command) -> None:
        self.client = client
        self.conversation = conversation
        self.answers: list[Answer] = []
        """The answers of this session, for their figures."""
        self.unanswered: Message | None = None
        """The last question, if it has no answer because of an error."""
        self._read = read
        self._run_command = run_command

    def run(self) -> int:
        """Runs until the user ends it. Returns 0."""
        self.note(f"{self.conversation.model}: /help lists the commands, Ctrl-D ends")
        interrupted, going_on = False, True
        while going_on:
            try:
                text = read_message(self._read)
            except EOFError:
                print()
                break
            except KeyboardInterrupt:
                print()
                if interrupted:
                    break
                interrupted = True
                self.note("Ctrl-C again or Ctrl-D ends")
                continue
            interrupted = False
            going_on = self._take(text)
        return Exit.OK

    def note(self, text: str) -> None:
        """Prints a line that is no part of the conversation."""
        print(styled(text, "dim"), flush=True)

    def ask(self) -> None:
        """Asks for the answer to the last message, and prints it. After an error that message is taken back."""
        answer = Answer()
        try:
            self._print(answer)
        except SettingsError:
            print()
            self.unanswered = self.conversation.undo()
            raise
        if not answer.content and answer.is_stopped:
            self.unanswered = self.conversation.undo()
        else:
            self.unanswered = None
            self.conversation.messages.append(answer.message)
        self.answers.append(answer)
        if sys.stdout.isatty():
            self.note(answer.figures())

    def _take(self, text: str) -> bool:
        """Handles a message or a command. Returns whether the session goes on."""
        unanswered = self.unanswered
        try:
            if text.startswith("/") and not text.startswith("//"):
                return self._run_command(self, text)
            if text:
                self.conversation.ask(text.removeprefix("/") if text.startswith("//") else text)
                self.ask()
        except (SettingsError, OSError, ValueError) as error:
            print(styled(f"error: {error}", "red", sys.stderr), file=sys.stderr, flush=True)
            if self.unanswered is not unanswered:
                self.note("The question was not answered; /retry asks it again.")
        except KeyboardInterrupt:
            print()
        return True

    def _print(self, answer: Answer) -> None:
        try:
            with contextlib.closing(stream(self.client, self.conversation, answer)) as arriving:
                print_pieces(arriving, is_terminal=True)
        except KeyboardInterrupt:
            answer.is_stopped = True
        print(flush=True)
