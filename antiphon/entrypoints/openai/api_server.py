"""`python -m antiphon.entrypoints.openai.api_server --model DIR …`: starts the server by the module name of vLLM.

The entry point is the same as `antiphon serve` with three differences: a model must be named (with `--model`, or in the
file of `--models`), the server listens on every network, and requests without a seed get seeds derived from seed 0. The
variable VLLM_API_KEY has the key that requests need, as there.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace

from antiphon.commands.ending import guarded
from antiphon.commands.parser import Parser, unknown_words
from antiphon.commands.serving import FIRST
from antiphon.settings import NOT_FOR_USERS, DirectSettings
from antiphon.shared.flags import SettingsError, add_flags, normalise, parse
from antiphon.shared.settings.other_options import Taken, take
from antiphon.terminal.output import tell


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the server until a signal stops it, and returns the exit code."""
    program = "python -m antiphon.entrypoints.openai.api_server"
    parser = Parser(prog=program, usage=f"{program} --model MODEL [FLAGS]", description=__doc__)
    parser.first = FIRST
    add_flags(parser, DirectSettings, skip=NOT_FOR_USERS)
    taken = take(normalise(sys.argv[1:] if argv is None else argv), os.environ)
    options, unknown = parser.parse_known_args(taken.words)
    if unknown:
        parser.error(unknown_words(unknown, parser.options()))
    return guarded(lambda: _serve(options, taken), starts_server=True)


def _serve(options: argparse.Namespace, taken: Taken) -> int:
    from antiphon.launch import launcher

    for notice in taken.notices():
        tell(notice)
    settings = parse(DirectSettings, options)
    if not (settings.model or settings.models):
        raise SettingsError(
            "--model is needed: the directory of a model, or its name on the Hugging Face hub. Or several in --models"
        )
    if not settings.api_keys:
        settings = replace(settings, api_keys=os.environ.get("VLLM_API_KEY", ""))
    return launcher.serve(settings, os.environ)


if __name__ == "__main__":
    sys.exit(main())
