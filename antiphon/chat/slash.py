"""The commands of a conversation in the terminal, which begin with `/`."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from antiphon.chat.conversation import SETTINGS, image_part
from antiphon.chat.session import Session


class Slash(NamedTuple):
    """A command: its arguments, what it does, and the function that does it with the text of the arguments."""

    arguments: str
    help: str
    run: Callable[[Session, str], object]


def run(session: Session, text: str) -> bool:
    """Runs a command. Returns whether the session goes on. Raises ValueError, OSError and SettingsError."""
    name, _, arguments = text.partition(" ")
    if name in ENDS:
        return False
    if name not in COMMANDS:
        raise ValueError(f"there is no command {name}: /help lists them; a message may begin with //")
    command = COMMANDS[name]
    if not arguments.strip() and command.arguments and not command.arguments.startswith("["):
        raise ValueError(f"write {name} {command.arguments}")
    command.run(session, arguments.strip())
    return True


def _help(_session: Session, _text: str) -> None:
    for name, command in COMMANDS.items():
        print(f"  {f'{name} {command.arguments}':<18} {command.help}")
    print(f"  {'/exit':<18} end the session, as Ctrl-D does")
    print('  """                begin and end a message of several lines; a backslash at the end of a line does too')
    print("  Ctrl-C             stop the answer")


def _clear(session: Session, _text: str) -> None:
    session.conversation.clear()
    session.note("The conversation is empty; the system message stays.")


def _system(session: Session, text: str) -> None:
    if text:
        session.conversation.set_system("" if text == "none" else text)
    session.note(f"system message: {session.conversation.system or '(none)'}")


def _model(session: Session, name: str) -> None:
    names = [str(card["id"]) for card in session.client.get("/v1/models")["data"]]
    if not name:
        for one in names:
            print(f"{'*' if one == session.conversation.model else ' '} {one}")
        return
    if name not in names:
        raise ValueError(f"the server has no model {name}; it has {', '.join(names)}")
    session.conversation.model = name
    session.note(f"model: {name}")


def _set(session: Session, text: str) -> None:
    name, _, value = text.partition(" ")
    if not value.strip():
        raise ValueError(f"write /set NAME VALUE; the names are {', '.join(SETTINGS)}; the value none removes it")
    session.conversation.change(name, value.strip())


def _settings(session: Session, _text: str) -> None:
    print(f"  {'model':<16} {session.conversation.model}")
    print(f"  {'system':<16} {session.conversation.system or '-'}")
    for name in SETTINGS:
        print(f"  {name:<16} {session.conversation.settings.get(name, '-')}")


def _retry(session: Session, _text: str) -> None:
    question = session.unanswered or session.conversation.undo()
    if question is None:
        raise ValueError("there is no question to ask again")
    session.conversation.messages.append(question)
    session.ask()


def _undo(session: Session, _text: str) -> None:
    if session.conversation.undo() is None:
        raise ValueError("there is no question to take back")
    session.note(f"The last question and its answer are gone; {len(session.conversation.messages)} messages are left.")


def _save(session: Session, text: str) -> None:
    path = Path(text).expanduser()
    session.conversation.save(path)
    session.note(f"{len(session.conversation.messages)} messages in {path}")


def _load(session: Session, text: str) -> None:
    path = Path(text).expanduser()
    try:
        session.conversation.load(path)
    except ValueError as error:
        raise ValueError(f"{path} is no conversation: {error}") from None
    session.note(f"{len(session.conversation.messages)} messages from {path}")


def _image(session: Session, text: str) -> None:
    session.conversation.images.append(image_part(Path(text).expanduser()))
    session.note(f"{len(session.conversation.images)} images go with the next message")


def _tokens(session: Session, _text: str) -> None:
    used = session.answers[-1].context_tokens if session.answers else 0
    cards = {str(card["id"]): card for card in session.client.get("/v1/models")["data"]}
    room = cards.get(session.conversation.model, {}).get("max_model_len")
    of = f" of {room}" if room else ""
    session.note(
        f"{used}{of} tokens after the last answer" if used else f"no answer yet; the context has {room} tokens"
    )


def _stats(session: Session, _text: str) -> None:
    for number, answer in enumerate(session.answers, 1):
        print(f"  answer {number}: {answer.figures()}")
    total = sum(answer.num_tokens for answer in session.answers)
    session.note(f"{len(session.answers)} answers, {total} tokens")


ENDS = ("/exit", "/quit", "/bye")
COMMANDS = {
    "/help": Slash("", "list the commands", _help),
    "/clear": Slash("", "forget the conversation", _clear),
    "/system": Slash("[TEXT]", "show or replace the system message; none removes it", _system),
    "/model": Slash("[NAME]", "list the models, or go on with another one", _model),
    "/set": Slash("NAME VALUE", "change a setting, such as temperature 0", _set),
    "/settings": Slash("", "show the settings", _settings),
    "/retry": Slash("", "ask the last question again", _retry),
    "/undo": Slash("", "take back the last question and its answer", _undo),
    "/save": Slash("FILE", "write the conversation to a file", _save),
    "/load": Slash("FILE", "go on with the conversation of a file", _load),
    "/image": Slash("FILE", "send an image with the next message", _image),
    "/tokens": Slash("", "show how much of the context is used", _tokens),
    "/stats": Slash("", "show tokens and speed of each answer", _stats),
}
