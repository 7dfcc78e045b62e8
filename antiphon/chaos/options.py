"""The options of `antiphon chaos`. Imports little, because every start of the command line imports it."""

import argparse
import os
import sys
from dataclasses import dataclass

from antiphon.chaos.schedule import ALL_GATEWAYS, DISK, EVERY_S, LASTING
from antiphon.shared.flags import SettingsError
from antiphon.terminal.address import given_key, server_flags

MAX_TOKENS = 400
CALM_S = 8.0
KINDS = ("kill", "freeze", "stop", "flip", "cut", *LASTING)
GROUPS = ("gateway", "tokenizer", "engine", "detokenizer", "nats", ALL_GATEWAYS, DISK)
"""Groups that `--faults` may name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosOptions:
    """What to run; see `add_options`."""

    minutes: float
    every_s: float
    streams: int
    seed: int
    server: str
    run_directory: str
    api_key: str
    model: str
    hang_s: float
    max_tokens: int
    json_path: str
    calm_s: float
    only: tuple[tuple[str, str], ...] = ()
    """Pairs of kind and group; empty: all."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument(
        "--minutes", type=float, default=2.0, help="how long faults are injected (default: %(default)s)"
    )
    parser.add_argument(
        "--every", type=float, default=EVERY_S, help="mean seconds between faults (default: %(default)s)"
    )
    parser.add_argument(
        "--calm", type=float, default=CALM_S, help="seconds without faults before the first one (default: %(default)s)"
    )
    parser.add_argument("--streams", type=int, default=16, help="streams at all times (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=None, help="repeats the schedule of another run (default: chance)")
    parser.add_argument("--model", default="", help="model of the server that is started (default: the demo model)")
    # Faults must not reach a server because of a variable.
    server_flags(parser, server="a server that runs already (default: one is started)", variables=False)
    parser.add_argument("--run-directory", default="", help="of that server: its directory antiphon-PID-… in /tmp")
    parser.add_argument("--max-tokens", type=int, default=MAX_TOKENS, help="longest answer (default: %(default)s)")
    parser.add_argument("--hang", type=float, default=60.0, help="seconds of silence that count as hung (default: 60)")
    parser.add_argument(
        "--faults",
        default="",
        metavar="KIND:GROUP,…",
        help="only these faults, as kill:gateway,freeze:nats (default: all kinds on all services)",
    )
    about = "write the report as JSON, to standard output or to a file"
    parser.add_argument("--json", nargs="?", const="-", default="", metavar="FILE", help=about)


def read_options(options: argparse.Namespace) -> ChaosOptions:
    """Returns the options of a parsed command line. Raises SettingsError if they cannot be used."""
    wanted = ChaosOptions(
        minutes=options.minutes,
        every_s=options.every,
        streams=options.streams,
        seed=int.from_bytes(os.urandom(4)) if options.seed is None else options.seed,
        server=options.server or "",
        run_directory=options.run_directory,
        api_key=given_key(options),
        model=options.model,
        hang_s=options.hang,
        max_tokens=options.max_tokens,
        json_path=options.json,
        calm_s=options.calm,
        only=_faults(options.faults),
    )
    _check(wanted)
    return wanted


def _faults(text: str) -> tuple[tuple[str, str], ...]:
    found: list[tuple[str, str]] = []
    for each in filter(None, text.split(",")):
        kind, _, group = each.partition(":")
        if kind not in KINDS or group not in GROUPS:
            raise SettingsError(
                f"--faults: {each!r} is no fault: give KIND:GROUP with one of {', '.join(KINDS)} "
                f"and one of {', '.join(GROUPS)}"
            )
        found.append((kind, group))
    return tuple(found)


def _check(options: ChaosOptions) -> None:
    if sys.platform != "linux":
        raise SettingsError("`antiphon chaos` verifies its faults in /proc, which only Linux has")
    for name in ("minutes", "every_s", "streams", "hang_s", "max_tokens"):
        if not getattr(options, name) > 0:
            raise SettingsError(
                f"--{name.removesuffix('_s').replace('_', '-')}: {getattr(options, name)} is not above 0"
            )
    if options.calm_s < 0:
        raise SettingsError(f"--calm: {options.calm_s} is below 0")
    if bool(options.server) != bool(options.run_directory):
        raise SettingsError("--server and --run-directory belong together: the address of a server, and its processes")
    if options.api_key and not options.server:
        raise SettingsError("--api-key is for the server at --server: leave it out for one that is started here")
    if options.server and options.model:
        raise SettingsError("--model is for a server that is started; the one at --server has its model")
