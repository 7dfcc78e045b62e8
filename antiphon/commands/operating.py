"""The commands for operators: of engines and models, and of recorded requests, which may travel to other servers."""

import argparse
from pathlib import Path

from antiphon.commands.command import Command, Run, client_of
from antiphon.commands.parser import Parser
from antiphon.shared.flags import SettingsError
from antiphon.terminal.address import server_flags

ADMIN = "API key with the scope 'admin'"
_KEY_HELP = "file with the key, 12 or more characters (default: ANTIPHON_SESSION_KEY)"


def _drain_flags(parser: Parser) -> None:
    parser.add_argument("engine", metavar="ENGINE", help="id of the engine, as `antiphon top` shows it")
    parser.add_argument("--force", action="store_true", help="also if it is the model's only engine")
    about = "seconds to wait for the moves (default: %(default)g)"
    parser.add_argument("--timeout", type=float, default=30.0, help=about)
    server_flags(parser, key=ADMIN)


def _resume_flags(parser: Parser) -> None:
    parser.add_argument("engine", metavar="ENGINE", help="id of the engine")
    server_flags(parser, key=ADMIN)


def _sleep_flags(parser: Parser) -> None:
    parser.add_argument("engine", metavar="ENGINE", help="id of the engine")
    about = "1: free the KV cache, on a GPU the weights too; 2: free the weights everywhere (default: %(default)s)"
    parser.add_argument("--level", type=int, choices=(1, 2), default=1, help=about)
    about = (
        "requests that run: wait (they move or end first), keep (they go on at another engine, or here after the "
        "wake) or abort (default: %(default)s)"
    )
    parser.add_argument("--mode", choices=("wait", "keep", "abort"), default="wait", help=about)
    parser.add_argument("--on-demand", action="store_true", help="let the next request wake it")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds to wait for it (default: %(default)g)")
    server_flags(parser, key=ADMIN)


def _wake_flags(parser: Parser) -> None:
    parser.add_argument("engine", metavar="ENGINE", help="id of the engine")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds to wait for it (default: %(default)g)")
    server_flags(parser, key=ADMIN)


def _models_flags(parser: Parser) -> None:
    kinds = parser.add_subparsers(dest="kind", metavar="KIND", required=True, parser_class=Parser)

    def add(name: str, help: str, run: Run) -> argparse.ArgumentParser:
        made = kinds.add_parser(name, help=help, description=help)
        server_flags(made, key=ADMIN)
        made.set_defaults(run=run)
        return made

    add("list", "show the models with their versions", _models_list)
    new = add("set", "start a new version beside the active one and switch to it when it is ready", _models_set)
    new.add_argument("pair", metavar="NAME=DIR", help="served name, and the new version's directory or hub name")
    about = "seconds to wait until it serves (default: %(default)g)"
    new.add_argument("--timeout", type=float, default=600.0, help=about)
    shadow = add("shadow", "compute copies of a share of the requests on another version and compare", _models_shadow)
    shadow.add_argument("pair", metavar="NAME=DIR", help="served name, and the version's directory; with --off NAME")
    shadow.add_argument("--share", type=float, default=0.05, help="share of the requests (default: %(default)g)")
    shadow.add_argument("--off", action="store_true", help="end the version that computes copies")
    shadow.add_argument("--timeout", type=float, default=600.0, help="seconds to wait until it runs")
    back = add("rollback", "go back to the former version while it still runs", _models_rollback)
    back.add_argument("name", metavar="NAME", help="served name of the model")
    load = add("load", "serve another model beside those that are served", _models_load)
    load.add_argument("pair", metavar="NAME=DIR", help="the name to serve it under, and its directory or hub name")
    about = "a setting of this model, as in a file of models (--set max-model-len=4096); may be repeated"
    load.add_argument("--set", metavar="FLAG=VALUE", action="append", default=[], help=about)
    load.add_argument("--timeout", type=float, default=600.0, help="seconds to wait until it serves")
    unload = add("unload", "end a model when it has served its requests", _models_unload)
    unload.add_argument("name", metavar="NAME", help="served name of the model")
    unload.add_argument("--timeout", type=float, default=600.0, help="seconds to wait until it has ended")


def _drain(options: argparse.Namespace) -> int:
    from antiphon.operate import engines

    client = client_of(options)
    return engines.drain(client, options.engine, force=options.force, timeout_s=options.timeout, as_json=options.json)


def _resume(options: argparse.Namespace) -> int:
    from antiphon.operate import engines

    return engines.resume(client_of(options), options.engine, as_json=options.json)


def _sleep(options: argparse.Namespace) -> int:
    from antiphon.operate import engines

    how = engines.Sleep(level=options.level, mode=options.mode, on_demand=options.on_demand)
    return engines.sleep(client_of(options), options.engine, how, timeout_s=options.timeout, as_json=options.json)


def _wake(options: argparse.Namespace) -> int:
    from antiphon.operate import engines

    return engines.wake(client_of(options), options.engine, timeout_s=options.timeout, as_json=options.json)


def _models_list(options: argparse.Namespace) -> int:
    from antiphon.operate import models

    return models.show_all(client_of(options), as_json=options.json)


def _models_set(options: argparse.Namespace) -> int:
    from antiphon.operate import models

    wait = models.Wait(timeout_s=options.timeout)
    return models.set_version(client_of(options), *models.pair(options.pair), wait, as_json=options.json)


def _models_shadow(options: argparse.Namespace) -> int:
    from antiphon.operate import models

    client = client_of(options)
    if options.off:
        return models.end_shadow(client, options.pair.partition("=")[0], as_json=options.json)
    if not 0 < options.share <= 1:
        raise SettingsError(f"--share: {options.share:g} is not above 0 and at most 1")
    wait = models.Wait(timeout_s=options.timeout)
    return models.shadow(client, *models.pair(options.pair), options.share, wait, as_json=options.json)


def _models_load(options: argparse.Namespace) -> int:
    from antiphon.operate import models

    model = models.Load(*models.pair(options.pair), models.settings_of(options.set))
    return models.load(client_of(options), model, models.Wait(timeout_s=options.timeout), as_json=options.json)


def _models_unload(options: argparse.Namespace) -> int:
    from antiphon.operate import models

    wait = models.Wait(timeout_s=options.timeout)
    return models.unload(client_of(options), options.name, wait, as_json=options.json)


def _models_rollback(options: argparse.Namespace) -> int:
    from antiphon.operate import models

    return models.roll_back(client_of(options), options.name, as_json=options.json)


def _verify_flags(parser: Parser) -> None:
    parser.add_argument("receipt", metavar="RECEIPT", help="file with an answer, a stream or a receipt")
    about = "directory or hub name of the model (demo: the demo model)"
    parser.add_argument("--model", required=True, metavar="DIR", help=about)
    parser.add_argument(
        "--keys", default="", metavar="FILE|URL", help="public keys of the server, a JWK set; or its URL"
    )
    parser.add_argument("--request", default="", metavar="FILE", help="body of the request, whose prompt is compared")
    parser.add_argument("--answer", default="", metavar="FILE", help="the answer, if RECEIPT is a receipt alone")
    about = "check this share of the lines of RECEIPT, each an answer with its receipt: above 0 up to 1"
    parser.add_argument("--sample", type=float, default=None, metavar="SHARE", help=about)
    parser.add_argument("--sample-seed", type=int, default=0, help="which lines are checked (default: %(default)s)")
    parser.add_argument("--dtype", default="auto", help="data type to compute with (default: %(default)s)")
    parser.add_argument("--quantization", default=None, help="how the server quantized the weights, as its flag")
    parser.add_argument("--kv-cache-dtype", default="auto", help="data type of the KV cache (default: %(default)s)")
    about = "compute as a server with --deterministic: on a GPU only its tokens can be compared"
    parser.add_argument("--deterministic", action="store_true", help=about)
    parser.add_argument(
        "--threads", type=int, default=0, help="threads to compute with (default: as many as are useful)"
    )


def _verify(options: argparse.Namespace) -> int:
    from antiphon.receipts import command

    names = ("dtype", "kv_cache_dtype", "threads", "deterministic")
    settings = {name: getattr(options, name) for name in names}
    order = command.Order(
        path=options.receipt,
        model=options.model,
        keys=options.keys,
        request=options.request,
        answer=options.answer,
        share=options.sample,
        seed=options.sample_seed,
        settings=settings | ({} if options.quantization is None else {"quantization": options.quantization}),
        as_json=options.json,
    )
    return command.run(order)


def _replay_flags(parser: Parser) -> None:
    parser.add_argument("request", metavar="ID|FILE", help="id of a request, or a file of `antiphon record save`")
    parser.add_argument("--engine", default="", help="id of the engine that runs it (default: any)")
    about = "run it in this process with this model (demo: the demo model)"
    parser.add_argument("--model", default="", metavar="DIR", help=about)
    server_flags(parser, key=ADMIN)


def _fork_flags(parser: Parser) -> None:
    parser.add_argument("request", metavar="ID", help="id of the request, or of its answer")
    about = "recorded tokens that the output begins with"
    parser.add_argument("--at", type=int, required=True, metavar="N", help=about)
    parser.add_argument("--index", type=int, default=0, help="which output of the request (default: the first)")
    parser.add_argument("--token-id", type=int, default=None, help="token at position N in place of the chosen one")
    about = "length of the whole output (default: as recorded)"
    parser.add_argument("--max-tokens", type=int, default=None, help=about)
    parser.add_argument("--temperature", type=float, default=None, help="another temperature (default: as recorded)")
    parser.add_argument("--top-p", type=float, default=None, help="another share of likely tokens")
    parser.add_argument("--seed", type=int, default=None, help="another seed")
    server_flags(parser, key=ADMIN)


def _record_flags(parser: Parser) -> None:
    kinds = parser.add_subparsers(dest="kind", metavar="KIND", required=True, parser_class=Parser)
    message = "write what it takes to run a request again to a file, for `antiphon replay FILE`"
    save = kinds.add_parser("save", help=message, description=message)
    save.add_argument("request", metavar="ID", help="id of the request, or of its answer")
    save.add_argument("file", metavar="FILE", type=Path, help="where to write it")
    server_flags(save, key=ADMIN)


def _replay(options: argparse.Namespace) -> int:
    from antiphon.operate import replay

    client = client_of(options)
    return replay.run(client, options.request, engine=options.engine, model=options.model, as_json=options.json)


def _fork(options: argparse.Namespace) -> int:
    from antiphon.operate import replay

    names = ("index", "token_id", "max_tokens", "temperature", "top_p", "seed")
    changes = {name: value for name in names if (value := getattr(options, name)) is not None}
    body = {"position": options.at, **changes}
    return replay.fork(client_of(options), options.request, body, as_json=options.json)


def _record(options: argparse.Namespace) -> int:
    from antiphon.operate import replay

    return replay.save(client_of(options), options.request, options.file, as_json=options.json)


def _session_flags(parser: Parser) -> None:
    kinds = parser.add_subparsers(dest="kind", metavar="KIND", required=True, parser_class=Parser)

    def add(name: str, help: str, run: Run) -> argparse.ArgumentParser:
        made = kinds.add_parser(name, help=help, description=help)
        server_flags(made)
        made.set_defaults(run=run)
        return made

    out = add("export", "write a generation with its KV to an encrypted file", _session_export)
    out.add_argument("id", metavar="ID", help="id of a request, of its answer, or of a session")
    out.add_argument("file", metavar="FILE", type=Path, help="where to write it")
    out.add_argument("--key-file", default="", metavar="FILE", help=_KEY_HELP)
    load = add("import", "read such a file, and print the session's id at this server", _session_import)
    load.add_argument("file", metavar="FILE", type=Path, help="a file of `antiphon session export`")
    load.add_argument("--key-file", default="", metavar="FILE", help=_KEY_HELP)
    goes_on = add("continue", "let an output that was cut go on, or ask for the next turn", _session_continue)
    goes_on.add_argument("id", metavar="ID", help="id of the session")
    goes_on.add_argument("--message", default=None, metavar="TEXT", help="the user's next message of a chat")
    goes_on.add_argument("--prompt", default=None, metavar="TEXT", help="text that follows the output as it is")
    goes_on.add_argument("--index", type=int, default=None, help="which output of the session (default: the first)")
    goes_on.add_argument("--max-tokens", type=int, default=None, help="length of the output (default: as recorded)")
    add("list", "show the sessions of the API key", _session_list)
    gone = add("delete", "delete a session at the server; its files stay valid", _session_delete)
    gone.add_argument("id", metavar="ID", help="id of the session")


def _session_export(options: argparse.Namespace) -> int:
    from antiphon.operate import sessions

    key = sessions.key_of(options.key_file)
    return sessions.export(client_of(options), options.id, options.file, key, as_json=options.json)


def _session_import(options: argparse.Namespace) -> int:
    from antiphon.operate import sessions

    return sessions.load(client_of(options), options.file, sessions.key_of(options.key_file), as_json=options.json)


def _session_continue(options: argparse.Namespace) -> int:
    from antiphon.operate import sessions

    if options.message is not None and options.prompt is not None:
        raise SettingsError("--prompt cannot be given together with --message")
    names = ("index", "prompt", "max_tokens")
    body = {name: value for name in names if (value := getattr(options, name)) is not None}
    if options.message is not None:
        body["messages"] = [{"role": "user", "content": options.message}]
    return sessions.proceed(client_of(options), options.id, body, as_json=options.json)


def _session_list(options: argparse.Namespace) -> int:
    from antiphon.operate import sessions

    return sessions.list_all(client_of(options), as_json=options.json)


def _session_delete(options: argparse.Namespace) -> int:
    from antiphon.operate import sessions

    return sessions.delete(client_of(options), options.id, as_json=options.json)


COMMANDS = (
    Command(
        name="drain",
        audience="operators",
        help="move an engine's streams to others, and keep it unused",
        run=_drain,
        flags=_drain_flags,
    ),
    Command(
        name="resume",
        audience="operators",
        help="take an engine back into service after `drain`",
        run=_resume,
        flags=_resume_flags,
    ),
    Command(
        name="sleep",
        audience="operators",
        help="free an engine's memory until it is woken",
        run=_sleep,
        flags=_sleep_flags,
    ),
    Command(
        name="wake",
        audience="operators",
        help="wake an engine after `sleep`",
        run=_wake,
        flags=_wake_flags,
    ),
    Command(
        name="models",
        audience="operators",
        help="load, unload and change models while the server runs",
        run=_models_list,
        flags=_models_flags,
    ),
    Command(
        name="verify",
        audience="users",
        help="prove the receipt of an answer by running the model",
        run=_verify,
        flags=_verify_flags,
    ),
    Command(
        name="replay",
        audience="operators",
        help="run a recorded request again and compare the tokens",
        run=_replay,
        flags=_replay_flags,
    ),
    Command(
        name="fork",
        audience="operators",
        help="continue a recorded output from a position on",
        run=_fork,
        flags=_fork_flags,
    ),
    Command(
        name="record",
        audience="operators",
        help="keep a recorded request in a file",
        run=_record,
        flags=_record_flags,
    ),
    Command(
        name="session",
        audience="operators",
        help="export generations to files, import and continue them",
        run=_session_list,
        flags=_session_flags,
    ),
)
