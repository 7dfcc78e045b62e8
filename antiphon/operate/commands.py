"""The flags of the commands for operators. Called by the command line, which passes how it adds a command."""

import argparse
from collections.abc import Callable
from typing import Protocol

from antiphon.chat import Client

Run = Callable[[argparse.Namespace], int]


class AddCommand(Protocol):
    """Adds a command and returns its parser."""

    def __call__(self, name: str, help: str, run: Run, /) -> argparse.ArgumentParser:
        """Adds the command `name`, which `run` runs."""
        ...


def add_commands(add: AddCommand) -> None:
    """Adds all commands of this package."""
    for name in ("drain", "move"):
        parser = _server(add(name, "move an engine's streams to others; it takes none until `resume`", _drain))
        parser.add_argument("engine", metavar="ENGINE", help="id of the engine, as `antiphon top` shows it")
        parser.add_argument("--force", action="store_true", help="also if it is the model's only engine")
        parser.add_argument(
            "--timeout", type=float, default=30.0, help="seconds to wait for the moves (default: %(default)g)"
        )
    resume = _server(add("resume", "take an engine back into service after `drain` or `move`", _resume))
    resume.add_argument("engine", metavar="ENGINE", help="id of the engine")


def client_of(options: argparse.Namespace) -> Client:
    """Returns a client for the server that `--server` and `--token` name."""
    return Client(options.server, options.token)


def _server(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("--server", default="http://127.0.0.1:8000", help="where the server is (default: %(default)s)")
    parser.add_argument("--token", default=None, help="API key with the scope 'admin' (default: none is sent)")
    return parser


def _drain(options: argparse.Namespace) -> int:
    from antiphon.operate import engines

    return engines.drain(client_of(options), options.engine, force=options.force, timeout_s=options.timeout)


def _resume(options: argparse.Namespace) -> int:
    from antiphon.operate import engines

    return engines.resume(client_of(options), options.engine)
