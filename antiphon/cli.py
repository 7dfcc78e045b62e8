"""The command `antiphon`: parses the command line and calls the chosen subcommand.

Modules of the subcommands are imported only when they run, so that `--help` is fast. Flags have the names that vLLM
uses; '-' and '_' are interchangeable in them. The error for an unknown flag suggests the most similar known flag.
"""

import argparse
import os
import re
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from antiphon.advice import plan
from antiphon.operate.commands import add_commands, client_of, server_flags
from antiphon.settings import NOT_FOR_USERS, SERVICES, InstanceSettings, RunSettings, ServeSettings, completed
from antiphon.shared.config import EngineSettings
from antiphon.shared.flags import SettingsError, add_flags, flags_of, normalise, parse
from antiphon.shared.settings.bus import BusSettings
from antiphon.shared.settings.other_options import BY_NAME, Taken, take
from antiphon.shared.version import __version__

CONFIGURATION_ERROR = 78
_DESCRIPTION = "Serves language models: `antiphon serve` starts everything on this machine."


_NUMBER = re.compile(r"invalid (int|float) value: ('.*')")
_NUMBERS = {"int": "whole number", "float": "number"}
"""How error messages call the types of options."""


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose error for an invalid choice suggests the most similar valid choice."""

    takes_whole_names = False
    """Whether options with one dash are whole words: `-tp` is neither `-t p` nor an abbreviation of another option."""

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        # Here argparse searches for abbreviated names and joined values; for one dash even if `allow_abbrev` is off.
        return [] if self.takes_whole_names else super()._get_option_tuples(option_string)

    def error(self, message: str) -> NoReturn:
        """Prints the error with the suggestion and exits with code 2."""
        message = _NUMBER.sub(lambda found: f"{found[2]} is not a {_NUMBERS[found[1]]}", message)
        self.exit(2, f"{self.prog}: {message}{self._suggestion(message)}\nTry `{self.prog} --help`.\n")

    def options(self) -> list[str]:
        """Returns all options of this parser with their leading dashes, except those of one letter."""
        return [text for action in self._actions for text in action.option_strings if len(text) > 2]

    def _suggestion(self, message: str) -> str:
        if "invalid choice: " not in message:
            return ""
        import difflib  # only needed for this message

        typed = message.split("invalid choice: ")[1].split("'")[1:2]
        known = [str(choice) for action in self._actions for choice in action.choices or ()]
        near = difflib.get_close_matches(typed[0], known, n=1) if typed else []
        return f". Did you mean {near[0]}?" if near else ""


Run = Callable[[argparse.Namespace], int]
Flags = Callable[[Parser], None]
"""Adds the flags of a command to its parser."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code. `argv` defaults to the arguments of the process."""
    words = normalise(sys.argv[1:] if argv is None else argv)
    parser, commands = make_parser(words[0] if words else "")
    taken = Taken(words, {}, {})
    if words[:1] in (["serve"], ["run"]):
        taken = take(words, os.environ)
    elif words[:1] == ["start-role"]:
        own = {item.metadata["env"] for item in flags_of(InstanceSettings)}
        taken = take(words, {name: value for name, value in os.environ.items() if name not in own})
    options, unknown = parser.parse_known_args(taken.words)
    if unknown:
        commands[options.command].error(unknown_words(unknown, commands[options.command].options()))
    return guarded(lambda: options.run(options), taken)


def guarded(run: Callable[[], int], taken: Taken) -> int:
    """Prints the notices of `taken`, calls `run` and returns an exit code.

    The exit code is what `run` returns, 78 after a SettingsError (whose message is printed) and 130 after Ctrl-C.
    `taken` holds options of other servers that are not settings here. If one of them is refused, `run` is not called.
    """
    try:
        for notice in taken.notices():
            print(f"antiphon: {notice}", file=sys.stderr)
        return run()
    except SettingsError as error:
        print(f"antiphon: {error}", file=sys.stderr)
        return CONFIGURATION_ERROR
    except KeyboardInterrupt:
        return 130


def make_parser(command: str | None = None) -> tuple[Parser, dict[str, Parser]]:
    """Returns the parser of the whole command line, and the subparser of each command by the command's name.

    `command`: only this command gets its flags, which takes a tenth of the time; None: each command gets them.
    """
    parser = Parser(prog="antiphon", description=_DESCRIPTION, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"antiphon {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=Parser)
    made: dict[str, Parser] = {}

    def add(name: str, help: str, run: Run, flags: Flags | None = None, usage: str | None = None) -> Parser:
        made[name] = commands.add_parser(name, help=help, description=help, allow_abbrev=False, usage=usage)
        made[name].set_defaults(run=run)
        if flags is not None and command in (None, name):
            flags(made[name])
        return made[name]

    add("serve", "start everything on this machine and serve a model", _serve, _serve_flags, _usage("serve [MODEL]"))
    message = "like `serve`, for containers: configured by environment variables, other defaults"
    add("run", message, _run, _flags_of(RunSettings), _usage("run"))
    add("service", "start one service in this process", _service, _service_flags, _usage("service SERVICE"))
    add("chat", "talk to a server in the terminal", _chat, _chat_flags)
    add("complete", "continue a text with a model in this process", _complete, _complete_flags)
    add("run-batch", "answer a file of requests in OpenAI's batch format", _run_batch, _batch_flags)
    add("quantize", "write a smaller checkpoint of a model, in 8 or 4 bits", _quantize, _quantize_flags)
    add("bench", "measure latency, throughput, or a server", _bench, _bench_kinds)
    add("tap", "print the messages on the bus, without prompts and texts", _tap, _tap_flags)
    add("top", "show every process and the requests in progress", _look, _look_flags("print one look and end"))
    add("trace", "show where the time of a request went", _trace, _trace_flags)
    add_commands(add)
    add("plan", "estimate the memory of a model, and list GPUs on which it fits", plan.run, _plan_flags)
    once = _look_flags("look for a few seconds; exit code 1 if anything is wrong")
    add("watch", "check the invariants of a running server, again and again", _look, once)
    add("chaos", "kill and freeze a server's processes, and compare what its clients get", _chaos, _chaos_flags)
    add("doctor", "check that this machine has what is needed", _doctor, _doctor_flags)
    message = "start one instance of separate prefill and decode instances, told by rank tables"
    add("start-role", message, _start_role, _flags_of(InstanceSettings), _usage("start-role"))
    add("tools-path", "print the directory of the scripts for rank tables, for LLM_TOOLS_PATH", _tools_path)
    message = "make or join the rank tables of separate prefill and decode instances"
    add("ranktable", message, _ranktable, _ranktable_flags)
    return parser, made


def _usage(words: str) -> str:
    return f"antiphon {words} [FLAGS]"


def unknown_words(words: Sequence[str], known: Sequence[str]) -> str:
    """Returns the error message for arguments that the parser did not recognise; it names the first of `words`.

    `known` is the list of options from which the message may suggest the most similar one.
    """
    import difflib  # only needed for this message

    word = words[0].partition("=")[0]
    near = difflib.get_close_matches(word, [*known, *BY_NAME], n=1) if word.startswith("-") else []
    if word in SERVICES:
        near = [f"`antiphon service {word}`"]
    return f"unknown {'option' if word.startswith('-') else 'argument'} {word}" + (
        f". Did you mean {near[0]}?" if near else ""
    )


def _serve_flags(parser: Parser) -> None:
    parser.add_argument("directory", nargs="?", metavar="MODEL", help="the same as --model")
    _flags_of(ServeSettings)(parser)


def _flags_of(kind: type[ServeSettings]) -> Flags:
    return lambda parser: add_flags(parser, kind, skip=NOT_FOR_USERS)


_PROGRAMS = {"setup": "antiphon.shared.deployment.store_keeper"}
"""Processes that are started like services, and are none: they neither get messages nor send heartbeats."""


def _service_flags(parser: Parser) -> None:
    names = (*SERVICES, *_PROGRAMS)
    parser.add_argument("service", choices=names, metavar="SERVICE", help=", ".join(names))
    parser.add_argument("flags", nargs=argparse.REMAINDER, metavar="FLAGS", help="the service's own; try --help")


def _chat_flags(parser: Parser) -> None:
    server_flags(parser)
    parser.add_argument("--model", default="", help="model to talk to (default: the server's first)")
    parser.add_argument("--max-tokens", type=int, default=512, help="longest answer (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.7, help="0: always the likeliest (default: %(default)s)")
    parser.add_argument("--top-p", type=float, default=1.0, help="share of likely tokens to draw from (default: 1.0)")
    parser.add_argument("--system", default=None, help="system message that starts the conversation")
    _image_flag(parser, "image of the first message (repeatable); needs a server with --enable-mm")


def _image_flag(parser: Parser, told: str) -> None:
    parser.add_argument("--image", metavar="FILE", action="append", type=Path, default=None, help=told)


def _complete_flags(parser: Parser) -> None:
    parser.add_argument("prompt", metavar="PROMPT", help="text to continue")
    parser.add_argument("--model", default="", help="directory of the model, or its hub name (default: the demo model)")
    parser.add_argument("--chat", action="store_true", help="PROMPT is a message to answer, not a text to continue")
    _image_flag(parser, "image (repeatable); without --chat PROMPT has the model's token for each")
    parser.add_argument("--max-tokens", type=int, default=256, help="longest continuation (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=1.0, help="0: always the likeliest (default: %(default)s)")
    parser.add_argument("--top-p", type=float, default=1.0, help="share of likely tokens to draw from (default: 1.0)")
    parser.add_argument("--seed", type=int, default=None, help="the same seed gives the same text (default: chance)")
    parser.add_argument("--stop", action="append", default=None, help="text that ends the continuation (repeatable)")
    parser.add_argument("--dtype", default="auto", help="type of weights and activations (default: %(default)s)")
    parser.add_argument("--max-model-len", type=int, default=None, help="longest context (default: the model's)")


def _batch_flags(parser: Parser) -> None:
    parser.add_argument("input", metavar="IN.jsonl", type=Path, help="requests, one JSON object a line")
    parser.add_argument("output", metavar="OUT.jsonl", type=Path, help="answers; a file that exists is continued")
    parser.add_argument("--server", default="", help="a server that runs (default: one is started for the batch)")
    parser.add_argument("--model", default="", help="model of the server that is started (default: the demo model)")
    parser.add_argument("--token", default=None, help="API key (default: none is sent)")
    parser.add_argument("--concurrency", type=int, default=64, help="requests at once (default: %(default)s)")


def _quantize_flags(parser: Parser) -> None:
    from antiphon.quantize import add_options

    parser.takes_whole_names = True
    add_options(parser)


def _bench_kinds(parser: Parser) -> None:
    from antiphon.benchmark.command import add_kinds

    kinds = parser.add_subparsers(dest="kind", metavar="KIND", required=True, parser_class=Parser)
    add_kinds(lambda name, help: kinds.add_parser(name, help=help, description=help, allow_abbrev=False))


def _tap_flags(parser: Parser) -> None:
    parser.add_argument("subject", nargs="?", default=">", metavar="SUBJECT", help="such as 'eng.>' (default: all)")
    parser.add_argument("--request", default="", metavar="ID", help="only messages of this request, by the server's id")
    parser.add_argument("--show-content", action="store_true", help="with prompts, tokens and texts")
    parser.add_argument("--count", type=int, default=0, help="messages to print (default: until Ctrl-C)")
    parser.add_argument(
        "--nats", default="", help="URL of the bus (default: ANTIPHON_NATS, or the server on this machine)"
    )
    parser.add_argument("--nats-credentials", default="", help="file with 'user:password' for the bus")
    parser.add_argument("--nats-tls-ca", default=None, help="PEM file of the authorities of a bus with TLS")
    parser.add_argument("--nats-tls-cert", default=None, help="PEM file of a certificate for a bus that asks for one")
    parser.add_argument("--nats-tls-key", default=None, help="PEM file of its private key")
    parser.add_argument("--namespace", default="antiphon", help="deployment on that bus (default: %(default)s)")


def _trace_flags(parser: Parser) -> None:
    parser.add_argument("request", metavar="ID", help="id of the request, of its answer, or the client's X-Request-Id")
    parser.add_argument("--steps", action="store_true", help="with every step of the engines")
    parser.add_argument("--trace-events", metavar="FILE", help="write a file that Perfetto and speedscope open instead")
    server_flags(parser)


def _look_flags(once: str) -> Flags:
    def add(parser: Parser) -> None:
        about = "seconds between two looks (default: %(default)s)"
        parser.add_argument("--interval", type=float, default=1.0, help=about)
        parser.add_argument("--once", action="store_true", help=once)
        server_flags(parser)

    return add


def _chaos_flags(parser: Parser) -> None:
    from antiphon.chaos.options import add_options

    add_options(parser)


def _doctor_flags(parser: Parser) -> None:
    parser.add_argument("--port", type=int, default=8000, help="port that must be free (default: %(default)s)")
    parser.add_argument("--model", default="", help="model directory to look at (default: the demo model)")
    parser.add_argument("--hf-overrides", default="", metavar="JSON", help="fields of config.json, as of `serve`")
    parser.add_argument("--sizing", action="store_true", help="print only which cards a model needs, or this --model")


def _plan_flags(parser: Parser) -> None:
    plan.add_options(parser)
    _serve_flags(parser)


def _ranktable_flags(parser: Parser) -> None:
    parser.add_argument(
        "--mode", required=True, choices=("gen", "merge"), help="gen: this machine's tables; merge: join"
    )
    parser.add_argument(
        "--save-dir", type=Path, default=Path(), help="directory of the tables (default: the current one)"
    )
    parser.add_argument("--api-server", action="store_true", help="gen: this machine has the scheduler, one in all")
    for role in ("prefill", "decode"):
        parser.add_argument(
            f"--{role}-server-list",
            nargs="+",
            action="extend",
            metavar="IDS",
            help=f"gen: device ids of each {role} instance of this machine, such as 4,5",
        )
    parser.add_argument("--ip", default="", help="gen: this machine's address (default: that of its default route)")
    parser.add_argument(
        "--global-ranktable-list",
        nargs="+",
        action="extend",
        type=Path,
        metavar="FILE",
        help="merge: the global tables of all machines",
    )


def _serve(options: argparse.Namespace) -> int:
    from antiphon.launch import launcher

    options.model = plan.named_model(options)
    names = getattr(options, "served_model_name_words", ())
    if len(names) > 1 and not options.model and any(os.sep in name or Path(name).exists() for name in names):
        # The option consumes every word up to the next option, including a word that was meant as MODEL. Names that
        # cannot be one are names of the demo model.
        raise SettingsError(
            f"--served-model-name took all of {', '.join(names)} as names: write MODEL before it, or use --model"
        )
    return launcher.serve(parse(ServeSettings, options), os.environ)


def _run(options: argparse.Namespace) -> int:
    from antiphon.launch import devices, launcher

    settings = parse(RunSettings, options)
    if settings.backend == "deepspeed" and settings.execution.dtype:
        message = "weights are loaded in the type that --ds-dtype (DS_DTYPE) computes with"
        print(f"antiphon: --dtype (DTYPE) has no effect with --backend=deepspeed: {message}", file=sys.stderr)
    return launcher.serve(completed(settings, devices.usable(settings.execution.device, os.environ)), os.environ)


def _service(options: argparse.Namespace) -> int:
    # The service parses its own flags and ends the process itself.
    sys.argv = [f"antiphon service {options.service}", *options.flags]
    runpy.run_module(_PROGRAMS.get(options.service, f"antiphon.services.{options.service}"), run_name="__main__")
    return 0


def _chat(options: argparse.Namespace) -> int:
    from antiphon import chat

    return chat.run(client_of(options), options)


def _complete(options: argparse.Namespace) -> int:
    import secrets

    from antiphon import complete
    from antiphon.offline.sampling_params import SamplingParams

    try:
        params = SamplingParams(
            max_tokens=options.max_tokens,
            temperature=options.temperature,
            top_p=options.top_p,
            seed=secrets.randbits(63) if options.seed is None else options.seed,
            stop=options.stop,
        )
        settings = {"dtype": options.dtype, "max_model_len": options.max_model_len}
        images = options.image or ()
        return complete.run(options.prompt, options.model, params, chat=options.chat, images=images, **settings)
    except ValueError as error:
        raise SettingsError(str(error)) from error


def _run_batch(options: argparse.Namespace) -> int:
    from antiphon import batch

    if options.concurrency < 1:
        raise SettingsError(f"--concurrency: {options.concurrency} is not at least 1")
    return batch.run(options.input, options.output, options.server, options.token, options.concurrency, options.model)


def _bench(options: argparse.Namespace) -> int:
    from antiphon.benchmark import command

    return command.run(options)


def _start_role(options: argparse.Namespace) -> int:
    from antiphon.disaggregation import start

    return start.run(options, os.environ)


def _tools_path(_options: argparse.Namespace) -> int:
    root = Path(__file__).resolve().parents[1]
    found = [path for path in (root / "infra" / "llm_tools", root / "llm_tools") if path.is_dir()]
    if not found:
        raise SettingsError("the scripts are not installed here; `antiphon ranktable` and `start-role` do the same")
    print(found[0])
    return 0


def _tap(options: argparse.Namespace) -> int:
    from antiphon.inspect import tap

    if options.count < 0:
        raise SettingsError(f"--count: {options.count} is not at least 0")
    request = options.request.rpartition("-")[2]  # the id of an answer begins with its kind
    wanted = tap.TapOptions(
        subject=options.subject,
        request=request,
        whole=options.show_content,
        count=options.count,
        namespace=options.namespace,
    )
    settings = parse(BusSettings, options)
    return tap.run(tap.find_bus(options.nats, options.nats_credentials, os.environ), wanted, settings)


def _trace(options: argparse.Namespace) -> int:
    from antiphon.inspect import trace

    client = client_of(options)
    if options.trace_events:
        return trace.save(client, options.request, options.trace_events)
    return trace.run(client, options.request, steps=options.steps)


def _look(options: argparse.Namespace) -> int:
    from antiphon.inspect import invariants, top

    if not options.interval > 0:
        raise SettingsError(f"--interval: {options.interval} is not above 0")
    run = top.run if options.command == "top" else invariants.watch
    return run(client_of(options), interval_s=options.interval, once=options.once)


def _chaos(options: argparse.Namespace) -> int:
    from antiphon.chaos import command

    return command.run(options)


def _quantize(options: argparse.Namespace) -> int:
    from antiphon import quantize

    return quantize.run(options)


def _ranktable(options: argparse.Namespace) -> int:
    from antiphon.disaggregation import table_tool

    if problem := table_tool.misplaced(options):
        make_parser()[1]["ranktable"].error(problem)
    return table_tool.run(options)


def _doctor(options: argparse.Namespace) -> int:
    from antiphon.advice import doctor

    model = parse(EngineSettings, argparse.Namespace(model=options.model, hf_overrides=options.hf_overrides), {})
    return doctor.run(model, options.port, sizing=options.sizing)


if __name__ == "__main__":
    sys.exit(main())
