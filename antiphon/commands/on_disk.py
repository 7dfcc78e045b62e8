"""The commands about models on this disk: `pull`, `list`, `rm` and `quantize`."""

import argparse

from antiphon.commands.command import Command
from antiphon.commands.parser import Parser


def _cache_flag(parser: Parser) -> None:
    about = "directory of the cache for models from the hub (default: that of HF_HOME)"
    parser.add_argument("--download-dir", default="", metavar="DIR", help=about)


def _pull_flags(parser: Parser) -> None:
    parser.add_argument("name", metavar="NAME", help="org/repo, or org/repo:Q4_K_M for one of its GGUF files")
    parser.add_argument("--revision", default="", help="branch, tag or commit (default: main)")
    _cache_flag(parser)


def _rm_flags(parser: Parser) -> None:
    parser.add_argument("name", metavar="NAME", help="name as `antiphon list` shows it; without a tag: all its files")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    _cache_flag(parser)


def _quantize_flags(parser: Parser) -> None:
    from antiphon.quantize import add_options

    parser.takes_whole_names = True
    add_options(parser)


def _pull(options: argparse.Namespace) -> int:
    from antiphon.operate import cached_models

    return cached_models.pull(options)


def _list(options: argparse.Namespace) -> int:
    from antiphon.operate import cached_models

    return cached_models.show_all(options)


def _rm(options: argparse.Namespace) -> int:
    from antiphon.operate import cached_models

    return cached_models.delete(options)


def _quantize(options: argparse.Namespace) -> int:
    from antiphon import quantize

    return quantize.run(options)


COMMANDS = (
    Command(
        name="pull",
        audience="users",
        help="download a model from the hub, and print where it is",
        run=_pull,
        flags=_pull_flags,
    ),
    Command(
        name="list",
        audience="users",
        help="list the models on this disk that can be served by name",
        run=_list,
        flags=_cache_flag,
    ),
    Command(name="rm", audience="users", help="remove a model from the caches on this disk", run=_rm, flags=_rm_flags),
    Command(
        name="quantize",
        usage="-i DIR -o DIR -quant_type NAME -tp N -t TYPE [FLAGS]",
        audience="users",
        help="write a smaller checkpoint of a model, in 8 or 4 bits",
        run=_quantize,
        flags=_quantize_flags,
    ),
)
