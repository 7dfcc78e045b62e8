"""The commands that measure and test a server: `bench` and `chaos`."""

import argparse

from antiphon.commands.command import Command
from antiphon.commands.parser import Parser

_FIRST = (
    "model",
    "input-len",
    "output-len",
    "batch-size",
    "num-iters",
    "num-iters-warmup",
    "num-prompts",
    "seed",
    "output-json",
    "json",
    "max-model-len",
    "max-num-seqs",
    "quantization",
    "dtype",
    "device",
    "tensor-parallel-size",
)
"""The flags that the plain `--help` of the measurements in this process shows; they take those of an engine too."""


def _bench_kinds(parser: Parser) -> None:
    from antiphon.benchmark.command import add_kinds

    kinds = parser.add_subparsers(dest="kind", metavar="KIND", required=True, parser_class=Parser)
    add_kinds(lambda name, help: kinds.add_parser(name, help=help, description=help))
    for name in ("latency", "throughput"):
        parser.kinds()[name].first = _FIRST


def _chaos_flags(parser: Parser) -> None:
    from antiphon.chaos.options import add_options

    add_options(parser)


def _bench(options: argparse.Namespace) -> int:
    from antiphon.benchmark import command

    return command.run(options)


def _chaos(options: argparse.Namespace) -> int:
    from antiphon.chaos import command

    return command.run(options)


COMMANDS = (
    Command(
        name="bench",
        audience="developers",
        help="measure latency, throughput, or a server",
        run=_bench,
        flags=_bench_kinds,
    ),
    Command(
        name="chaos",
        audience="developers",
        help="kill and freeze a server's processes; compare all answers",
        run=_chaos,
        flags=_chaos_flags,
    ),
)
