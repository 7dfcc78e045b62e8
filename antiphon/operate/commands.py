"""The flags of the commands for operators. Called by the command line, which passes a function that adds a command."""

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

if TYPE_CHECKING:
    from antiphon.client import Client

Run = Callable[[argparse.Namespace], int]
AddCommand = Callable[[str, str, Run], argparse.ArgumentParser]
"""Adds a command with a name and a description, and returns its parser."""
POLL_S = 0.1
"""Time between two looks at an engine that is drained, seconds."""


def add_commands(add: AddCommand) -> None:
    """Adds all commands of this package."""
    _cache_flags(add)
    drain = _server(add("drain", "move an engine's streams to others; it takes none until `resume`", _drain))
    drain.add_argument("engine", metavar="ENGINE", help="id of the engine, as `antiphon top` shows it")
    drain.add_argument("--force", action="store_true", help="also if it is the model's only engine")
    drain.add_argument(
        "--timeout", type=float, default=30.0, help="seconds to wait for the moves (default: %(default)g)"
    )
    resume = _server(add("resume", "take an engine back into service after `drain`", _resume))
    resume.add_argument("engine", metavar="ENGINE", help="id of the engine")
    replay = _server(add("replay", "run a recorded request again and compare the tokens", _replay), ("--url",))
    replay.add_argument("request", metavar="ID|FILE", help="id of a request, or a file of `antiphon record save`")
    replay.add_argument("--engine", default="", help="id of the engine that runs it (default: any)")
    replay.add_argument(
        "--model", default="", metavar="DIR", help="run it in this process with this model (demo: the demo model)"
    )
    _fork_flags(_server(add("fork", "continue a recorded output from a position on", _fork), ("--url",)))
    _record_flags(add("record", "keep a recorded request in a file", _record_save))
    _models_flags(add("models", "list and change the versions of the models that are served", _models_list))


def _cache_flags(add: AddCommand) -> None:
    """Adds the commands about the models on this disk, which need no server."""

    def command(name: str, help: str, run: str) -> argparse.ArgumentParser:
        made = add(name, help, lambda options: _of_caches(run, options))
        about = "directory of the cache for models from the hub (default: that of HF_HOME)"
        made.add_argument("--download-dir", default="", metavar="DIR", help=about)
        return made

    pull = command("pull", "download a model from the hub, and print where it is", "pull")
    pull.add_argument("name", metavar="NAME", help="org/repo, or org/repo:Q4_K_M for one of its GGUF files")
    pull.add_argument("--revision", default="", help="branch, tag or commit (default: main)")
    shown = command("list", "list the models on this disk that can be served by name", "show")
    shown.add_argument("--json", action="store_true", help="print a JSON list instead of a table")
    gone = command("rm", "remove a model from the caches on this disk", "delete")
    gone.add_argument("name", metavar="NAME", help="name as `antiphon list` shows it; without a tag: all its files")
    gone.add_argument("--yes", action="store_true", help="do not ask")


def _of_caches(name: str, options: argparse.Namespace) -> int:
    from antiphon.operate import cached_models

    runs = {"pull": cached_models.pull, "show": cached_models.show, "delete": cached_models.delete}
    return runs[name](options)


def _fork_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("request", metavar="ID", help="id of the request, or of its answer")
    parser.add_argument(
        "--at", type=int, required=True, metavar="N", help="recorded tokens that the output begins with"
    )
    parser.add_argument("--index", type=int, default=0, help="which output of the request (default: the first)")
    parser.add_argument("--token-id", type=int, default=None, help="token at position N in place of the chosen one")
    parser.add_argument(
        "--max-tokens", type=int, default=None, help="length of the whole output (default: as recorded)"
    )
    parser.add_argument("--temperature", type=float, default=None, help="another temperature (default: as recorded)")
    parser.add_argument("--top-p", type=float, default=None, help="another share of likely tokens")
    parser.add_argument("--seed", type=int, default=None, help="another seed")


def _record_flags(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="kind", metavar="KIND", required=True)
    message = "write what it takes to run a request again to a file, for `antiphon replay FILE`"
    save = _server(kinds.add_parser("save", help=message, description=message, allow_abbrev=False), ("--url",))
    save.add_argument("request", metavar="ID", help="id of the request, or of its answer")
    save.add_argument("file", metavar="FILE", type=Path, help="where to write it")


def _models_flags(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="kind", metavar="KIND", required=True)

    def add(name: str, help: str, run: Run) -> argparse.ArgumentParser:
        made = _server(kinds.add_parser(name, help=help, description=help, allow_abbrev=False))
        made.set_defaults(run=run)
        return made

    add("list", "show the models with their versions", _models_list)
    new = add("set", "start a new version beside the active one and switch to it when it is ready", _models_set)
    new.add_argument("pair", metavar="NAME=DIR", help="served name, and the new version's directory or hub name")
    new.add_argument(
        "--timeout", type=float, default=600.0, help="seconds to wait until it serves (default: %(default)g)"
    )
    shadow = add("shadow", "compute copies of a share of the requests on another version and compare", _models_shadow)
    shadow.add_argument("pair", metavar="NAME=DIR", help="served name, and the version's directory; with --off NAME")
    shadow.add_argument("--share", type=float, default=0.05, help="share of the requests (default: %(default)g)")
    shadow.add_argument("--off", action="store_true", help="end the version that computes copies")
    shadow.add_argument("--timeout", type=float, default=600.0, help="seconds to wait until it runs")
    back = add("rollback", "go back to the former version while it still runs", _models_rollback)
    back.add_argument("name", metavar="NAME", help="served name of the model")


def client_of(options: argparse.Namespace) -> "Client":
    """Returns a client for the server that `--server` and `--token` name."""
    from antiphon.client import Client

    return Client(options.server, options.token)


def server_flags(
    parser: argparse.ArgumentParser, also: Sequence[str] = (), *, key: str = "API key"
) -> argparse.ArgumentParser:
    """Adds the flags that `client_of` reads. `also`: further names of `--server`; `key`: what `--token` is."""
    parser.add_argument(
        "--server", *also, default="http://127.0.0.1:8000", help="where the server is (default: %(default)s)"
    )
    parser.add_argument("--token", default=None, help=f"{key} (default: none is sent)")
    return parser


def _server(parser: argparse.ArgumentParser, also: Sequence[str] = ()) -> argparse.ArgumentParser:
    return server_flags(parser, also, key="API key with the scope 'admin'")


def _drain(options: argparse.Namespace) -> int:
    """Takes an engine out of service. Prints the moved sequences when the engine has none left, or after the timeout.

    Returns 1 if it still has sequences then. Raises SettingsError if the server refuses.
    """
    client, path = client_of(options), f"/admin/engines/{quote(options.engine, safe='')}"
    before = client.get(path)["sequences"]
    client.post(f"{path}/drain", {"force": options.force})
    deadline = time.monotonic() + options.timeout
    while True:
        found = client.get(path)
        if (found["state"] != "ready" and not found["sequences"]) or time.monotonic() > deadline:
            break
        time.sleep(POLL_S)
    print("\n".join(_moves(found, before)))
    return int(found["sequences"] > 0)


def _moves(found: dict[str, Any], before: int) -> Iterator[str]:
    """Yields the lines about an engine after a drain. `before`: its sequences before the drain."""
    engine, moved = found["id"], found["moved"]
    for move in moved:
        where = f"to {move['to']}" if move["to"] else "waits for an engine with room"
        yield f"{move['sequence']}  after {move['position']} tokens  {where}"
    yield f"{engine} is out of service until `antiphon resume {engine}`: {before} sequences before, {len(moved)} moved"
    if found["sequences"]:
        why = "other engines have no room for them" if found["others"] else "the model has no other engine"
        yield f"{found['sequences']} sequences are still there ({why}); they move when there is room, or end there"


def _resume(options: argparse.Namespace) -> int:
    client_of(options).post(f"/admin/engines/{quote(options.engine, safe='')}/resume", {})
    print(f"{options.engine} takes requests again")
    return 0


def _models_list(options: argparse.Namespace) -> int:
    from antiphon.operate import models

    return models.show(client_of(options))


def _models_set(options: argparse.Namespace) -> int:
    from antiphon.operate import models

    return models.set_version(client_of(options), *models.pair(options.pair), timeout_s=options.timeout)


def _models_rollback(options: argparse.Namespace) -> int:
    from antiphon.operate import models

    return models.roll_back(client_of(options), options.name)


def _replay(options: argparse.Namespace) -> int:
    from antiphon.operate import replay

    return replay.run(client_of(options), options.request, engine=options.engine, model=options.model)


def _fork(options: argparse.Namespace) -> int:
    from antiphon.operate import replay

    names = ("index", "token_id", "max_tokens", "temperature", "top_p", "seed")
    changes = {name: value for name in names if (value := getattr(options, name)) is not None}
    return replay.fork(client_of(options), options.request, {"position": options.at, **changes})


def _record_save(options: argparse.Namespace) -> int:
    from antiphon.operate import replay

    return replay.save(client_of(options), options.request, options.file)


def _models_shadow(options: argparse.Namespace) -> int:
    from antiphon.operate import models

    if options.off:
        return models.end_shadow(client_of(options), options.pair.partition("=")[0])
    return models.shadow(client_of(options), *models.pair(options.pair), options.share, timeout_s=options.timeout)
