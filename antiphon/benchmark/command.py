"""The flags of the three `antiphon bench` commands, and their execution. Called by the command line."""

import argparse
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

from antiphon.benchmark.figures import Figures, table, write
from antiphon.shared.config import EngineSettings
from antiphon.shared.flags import SettingsError, add_flags, flags_of, given_of, parse
from antiphon.shared.settings.bus import BusSettings
from antiphon.terminal.address import address_of, server_flags
from antiphon.terminal.output import show

Add = Callable[[str, str], argparse.ArgumentParser]
NOT_OFFLINE = frozenset(item.name for item in flags_of(BusSettings))


def add_kinds(add: Add) -> None:
    """Adds the three commands; `add` creates a parser from a command's name and description."""
    latency = add("latency", "seconds of a batch that starts and ends together, with a model in this process")
    _lengths(latency, 32, 128)
    latency.add_argument("--batch-size", type=int, default=8, help="sequences (default: %(default)s)")
    latency.add_argument("--num-iters-warmup", type=int, default=2, help="batches before (default: %(default)s)")
    latency.add_argument("--num-iters", type=int, default=10, help="batches that count (default: %(default)s)")
    add_flags(latency, EngineSettings, skip=NOT_OFFLINE)
    throughput = add("throughput", "tokens a second of many prompts at once, with a model in this process")
    _lengths(throughput, 256, 64)
    throughput.add_argument("--num-prompts", type=int, default=100, help="prompts (default: %(default)s)")
    add_flags(throughput, EngineSettings, skip=NOT_OFFLINE)
    serve = add("serve", "times and tokens of requests to a server; ttft is counted from the moment a request is sent")
    _lengths(serve, 256, 64)
    server_flags(serve)
    serve.add_argument("--model", default="", help="model to ask (default: the server's first)")
    serve.add_argument("--num-prompts", type=int, default=100, help="requests (default: %(default)s)")
    serve.add_argument(
        "--request-rate", type=float, default=float("inf"), help="arrivals a second, at random (default: all at once)"
    )
    about = "most requests at once (default: no limit). The wait for a place is reported as wait; ttft does not have it"
    serve.add_argument("--max-concurrency", type=int, default=None, help=about)


def run(options: argparse.Namespace) -> int:
    """Runs one benchmark and prints its results. Raises SettingsError."""
    for name in ("input_len", "output_len", "batch_size", "num_iters", "num_prompts", "max_concurrency"):
        value = getattr(options, name, None)
        if value is not None and value < 1:
            raise SettingsError(f"--{name.replace('_', '-')}: {value} is not at least 1")
    if getattr(options, "request_rate", 1.0) <= 0:
        raise SettingsError(f"--request-rate: {options.request_rate} is not above 0")
    try:
        figures = _serve(options) if options.kind == "serve" else _offline(options)
    except SettingsError:
        raise
    except ValueError as error:
        raise SettingsError(str(error)) from error
    show(figures, table(f"antiphon bench {options.kind}", figures), as_json=options.json)
    if options.output_json is not None:
        write(figures, options.output_json)
    return 0


def _serve(options: argparse.Namespace) -> Figures:
    from antiphon.benchmark import serving

    names = [item.name for item in fields(serving.ServingLoad) if item.name != "address"]
    given = {name: getattr(options, name) for name in names}
    return serving.measure(serving.ServingLoad(address=address_of(options), **given))


def _offline(options: argparse.Namespace) -> Figures:
    from antiphon.benchmark.offline import OfflineBenchmark

    settings = parse(EngineSettings, options)
    given = {"model": settings.model, **given_of(settings)}
    benchmark = OfflineBenchmark(given, options.input_len, options.output_len, options.seed)
    try:
        if options.kind == "latency":
            return benchmark.latency(options.batch_size, options.num_iters_warmup, options.num_iters)
        return benchmark.throughput(options.num_prompts)
    finally:
        benchmark.close()


def _lengths(parser: argparse.ArgumentParser, input_len: int, output_len: int) -> None:
    parser.add_argument("--input-len", type=int, default=input_len, help="tokens of a prompt (default: %(default)s)")
    parser.add_argument("--output-len", type=int, default=output_len, help="tokens of an output (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of prompts and arrivals (default: %(default)s)")
    parser.add_argument("--output-json", type=Path, default=None, help="file for the figures")
