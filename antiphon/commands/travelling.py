"""The command `session`: generations that travel between servers in encrypted files."""

import argparse
from pathlib import Path

from antiphon.commands.command import Command, Run, client_of
from antiphon.commands.parser import Parser
from antiphon.shared.flags import SettingsError
from antiphon.terminal.address import server_flags

_KEY_HELP = "file with the key, 12 or more characters (default: ANTIPHON_SESSION_KEY)"


def _flags(parser: Parser) -> None:
    kinds = parser.add_subparsers(dest="kind", metavar="KIND", required=True, parser_class=Parser)

    def add(name: str, help: str, run: Run) -> argparse.ArgumentParser:
        made = kinds.add_parser(name, help=help, description=help)
        server_flags(made)
        made.set_defaults(run=run)
        return made

    out = add("export", "write a generation with its KV to an encrypted file", _export)
    out.add_argument("id", metavar="ID", help="id of a request, of its answer, or of a session")
    out.add_argument("file", metavar="FILE", type=Path, help="where to write it")
    out.add_argument("--key-file", default="", metavar="FILE", help=_KEY_HELP)
    load = add("import", "read such a file, and print the session's id at this server", _import)
    load.add_argument("file", metavar="FILE", type=Path, help="a file of `antiphon session export`")
    load.add_argument("--key-file", default="", metavar="FILE", help=_KEY_HELP)
    goes_on = add("continue", "let an output that was cut go on, or ask for the next turn", _continue)
    goes_on.add_argument("id", metavar="ID", help="id of the session")
    goes_on.add_argument("--message", default=None, metavar="TEXT", help="the user's next message of a chat")
    goes_on.add_argument("--prompt", default=None, metavar="TEXT", help="text that follows the output as it is")
    goes_on.add_argument("--index", type=int, default=None, help="which output of the session (default: the first)")
    goes_on.add_argument("--max-tokens", type=int, default=None, help="length of the output (default: as recorded)")
    add("list", "show the sessions of the API key", _list)
    gone = add("delete", "delete a session at the server; its files stay valid", _delete)
    gone.add_argument("id", metavar="ID", help="id of the session")


def _export(options: argparse.Namespace) -> int:
    from antiphon.operate import sessions

    key = sessions.key_of(options.key_file)
    return sessions.export(client_of(options), options.id, options.file, key, as_json=options.json)


def _import(options: argparse.Namespace) -> int:
    from antiphon.operate import sessions

    return sessions.load(client_of(options), options.file, sessions.key_of(options.key_file), as_json=options.json)


def _continue(options: argparse.Namespace) -> int:
    from antiphon.operate import sessions

    if options.message is not None and options.prompt is not None:
        raise SettingsError("--prompt cannot be given together with --message")
    names = ("index", "prompt", "max_tokens")
    body = {name: value for name in names if (value := getattr(options, name)) is not None}
    if options.message is not None:
        body["messages"] = [{"role": "user", "content": options.message}]
    return sessions.proceed(client_of(options), options.id, body, as_json=options.json)


def _list(options: argparse.Namespace) -> int:
    from antiphon.operate import sessions

    return sessions.list_all(client_of(options), as_json=options.json)


def _delete(options: argparse.Namespace) -> int:
    from antiphon.operate import sessions

    return sessions.delete(client_of(options), options.id, as_json=options.json)


COMMANDS = (
    Command(
        name="session",
        audience="operators",
        help="export generations to files, import and continue them",
        run=_list,
        flags=_flags,
    ),
)
