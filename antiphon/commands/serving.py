"""The commands that start a server or a part of one: `serve`, `run`, `service` and `start-role`."""

import argparse
import os
import runpy
import sys
from pathlib import Path

from antiphon.commands.command import Command, Flags
from antiphon.commands.parser import Parser
from antiphon.shared.flags import SettingsError, add_flags, parse
from antiphon.terminal.output import tell

FIRST = (
    "model",
    "served-model-name",
    "host",
    "port",
    "api-keys",
    "max-model-len",
    "max-num-seqs",
    "quantization",
    "dtype",
    "device",
    "gpu-memory-utilization",
    "kv-cache-memory-gb",
    "tensor-parallel-size",
    "engines",
    "gateways",
    "chat-template",
    "reasoning-parser",
    "tool-call-parser",
    "enable-lora",
    "enable-mm",
    "log-level",
)
"""The flags that the plain `antiphon serve --help` shows."""
_PROGRAMS = {"setup": "antiphon.shared.deployment.store_keeper"}
"""Processes that are started like services, and are none: they neither get messages nor send heartbeats."""


def add_serve_flags(parser: Parser) -> None:
    """Adds MODEL and the flags of `serve`."""
    parser.add_argument("directory", nargs="?", metavar="MODEL", help="the same as --model")
    _settings_flags("ServeSettings")(parser)


def named_model(options: argparse.Namespace) -> str:
    """Returns the model that MODEL or `--model` names. Raises SettingsError if both do."""
    if options.directory and options.model:
        raise SettingsError("the model is named twice, as MODEL and with --model")
    return options.model or options.directory


def _settings_flags(kind: str) -> Flags:
    """Returns a function that adds the flags of a class of settings, by the name that it has in `antiphon.settings`."""

    def add(parser: Parser) -> None:
        # The classes have hundreds of fields: other commands, and the overview, do without them.
        from antiphon import settings

        add_flags(parser, getattr(settings, kind), skip=settings.NOT_FOR_USERS)

    return add


def _service_flags(parser: Parser) -> None:
    from antiphon.settings import SERVICES

    names = (*SERVICES, *_PROGRAMS)
    parser.add_argument("service", choices=names, metavar="SERVICE", help=", ".join(names))
    parser.add_argument("flags", nargs=argparse.REMAINDER, metavar="FLAGS", help="the service's own; try --help")


def _serve(options: argparse.Namespace) -> int:
    from antiphon.launch import launcher
    from antiphon.settings import ServeSettings

    options.model = named_model(options)
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
    from antiphon.settings import RunSettings, completed

    settings = parse(RunSettings, options)
    if settings.backend == "deepspeed" and settings.execution.dtype:
        message = "weights are loaded in the type that --ds-dtype (DS_DTYPE) computes with"
        tell(f"--dtype (DTYPE) has no effect with --backend=deepspeed: {message}")
    return launcher.serve(completed(settings, devices.usable(settings.execution.device, os.environ)), os.environ)


def _service(options: argparse.Namespace) -> int:
    # The service parses its own flags and ends the process itself.
    sys.argv = [f"antiphon service {options.service}", *options.flags]
    runpy.run_module(_PROGRAMS.get(options.service, f"antiphon.services.{options.service}"), run_name="__main__")
    return 0


def _start_role(options: argparse.Namespace) -> int:
    from antiphon.disaggregation import start

    return start.run(options, os.environ)


COMMANDS = (
    Command(
        name="serve",
        audience="users",
        help="start everything on this machine and serve a model",
        run=_serve,
        flags=add_serve_flags,
        first=FIRST,
        has_json=False,
        starts_server=True,
    ),
    Command(
        name="run",
        audience="operators",
        help="like `serve`, in a container: set by environment variables",
        run=_run,
        flags=_settings_flags("RunSettings"),
        first=("backend", *FIRST),
        has_json=False,
        starts_server=True,
    ),
    Command(
        name="service",
        audience="operators",
        help="start one service in this process",
        run=_service,
        flags=_service_flags,
        usage="SERVICE [FLAGS]",
        has_json=False,
        starts_server=True,
    ),
    Command(
        name="start-role",
        audience="operators",
        help="start the instance of a prefill/decode split by rank tables",
        run=_start_role,
        flags=_settings_flags("InstanceSettings"),
        first=("global-rank-table-file-path", "rank-table-file-path", "node-ports", *FIRST),
        has_json=False,
        starts_server=True,
    ),
)
