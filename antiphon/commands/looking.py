"""The commands that show a running server: `top`, `watch`, `trace` and `tap`."""

import argparse
import os

from antiphon.commands.command import Command, Flags, client_of
from antiphon.commands.parser import Parser
from antiphon.shared.flags import SettingsError
from antiphon.terminal.address import server_flags


def _look_flags(once: str) -> Flags:
    def add(parser: Parser) -> None:
        about = "seconds between two looks (default: %(default)s)"
        parser.add_argument("--interval", type=float, default=1.0, help=about)
        parser.add_argument("--once", action="store_true", help=once)
        server_flags(parser)
        parser.add_argument("--json", action="store_true", help="print a JSON object a line, for each look")

    return add


def _trace_flags(parser: Parser) -> None:
    parser.add_argument("request", metavar="ID", help="id of the request, of its answer, or the client's X-Request-Id")
    parser.add_argument("--steps", action="store_true", help="with every step of the engines")
    parser.add_argument("--trace-events", metavar="FILE", help="write a file that Perfetto and speedscope open instead")
    server_flags(parser)


def _tap_flags(parser: Parser) -> None:
    parser.add_argument("subject", nargs="?", default=">", metavar="SUBJECT", help="such as 'eng.>' (default: all)")
    parser.add_argument("--request", default="", metavar="ID", help="only messages of this request, by the server's id")
    parser.add_argument("--show-content", action="store_true", help="with prompts, tokens and texts")
    parser.add_argument("--count", type=int, default=0, help="messages to print (default: until Ctrl-C)")
    about = "address of the server on this machine whose bus to tap, if several run"
    parser.add_argument("--server", default="", metavar="URL", help=about)
    about = "URL of the bus (default: ANTIPHON_NATS, or that of the server on this machine)"
    parser.add_argument("--nats", default="", metavar="URL", help=about)
    parser.add_argument("--nats-credentials", default="", metavar="FILE", help="file with 'user:password' for the bus")
    parser.add_argument("--nats-tls-ca", default=None, help="PEM file of the authorities of a bus with TLS")
    parser.add_argument("--nats-tls-cert", default=None, help="PEM file of a certificate for a bus that asks for one")
    parser.add_argument("--nats-tls-key", default=None, help="PEM file of its private key")
    parser.add_argument("--namespace", default="antiphon", help="deployment on that bus (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="a JSON object a line, which is what it always prints")


def _interval(options: argparse.Namespace) -> float:
    if not options.interval > 0:
        raise SettingsError(f"--interval: {options.interval} is not above 0")
    return options.interval


def _top(options: argparse.Namespace) -> int:
    from antiphon.inspect import top

    return top.run(client_of(options), interval_s=_interval(options), once=options.once, as_json=options.json)


def _watch(options: argparse.Namespace) -> int:
    from antiphon.inspect import invariants

    return invariants.watch(client_of(options), interval_s=_interval(options), once=options.once, as_json=options.json)


def _trace(options: argparse.Namespace) -> int:
    from antiphon.inspect import trace

    client = client_of(options)
    if options.trace_events:
        return trace.save(client, options.request, options.trace_events, as_json=options.json)
    return trace.run(client, options.request, steps=options.steps, as_json=options.json)


def _tap(options: argparse.Namespace) -> int:
    from antiphon.inspect import tap
    from antiphon.shared.flags import parse
    from antiphon.shared.settings.bus import BusSettings

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
    place = tap.find_bus(options.nats, options.nats_credentials, os.environ, server=options.server)
    return tap.run(place, wanted, settings)


COMMANDS = (
    Command(
        name="top",
        audience="operators",
        help="show every process and the requests in progress",
        run=_top,
        flags=_look_flags("print one look and end"),
    ),
    Command(
        name="watch",
        audience="operators",
        help="check the invariants of a running server, again and again",
        run=_watch,
        flags=_look_flags("look for a few seconds; exit code 1 if anything is wrong"),
    ),
    Command(
        name="trace",
        audience="operators",
        help="show where the time of a request went",
        run=_trace,
        flags=_trace_flags,
    ),
    Command(
        name="tap",
        audience="developers",
        help="print the messages on the bus, without prompts and texts",
        run=_tap,
        flags=_tap_flags,
    ),
)
