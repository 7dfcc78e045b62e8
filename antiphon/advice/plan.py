"""The command `antiphon plan`: its options, and the call of `antiphon.advice.sizing`, which imports torch."""

import argparse

from antiphon.shared.config import check_engine
from antiphon.shared.flags import SettingsError, parse


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that this command has in addition to those of `serve`."""
    parser.add_argument("--gpu", default="", metavar="NAME", help="card to plan for, such as L20 (default: all)")
    parser.add_argument("--memory-gb", type=float, default=None, help="memory of the card, GiB, instead of a known one")


def named_model(options: argparse.Namespace) -> str:
    """Returns the model that MODEL or `--model` names. Raises SettingsError if both do."""
    if options.directory and options.model:
        raise SettingsError("the model is named twice, as MODEL and with --model")
    return options.model or options.directory


def run(options: argparse.Namespace) -> int:
    """Prints the plan. Raises SettingsError for an invalid model, setting or card."""
    from antiphon.advice import sizing
    from antiphon.settings import ServeSettings

    options.model = named_model(options)
    card = sizing.chosen_card(options.gpu, options.memory_gb)
    settings = parse(ServeSettings, options)
    check_engine(settings)
    print("\n".join(sizing.plan_lines(settings, card)))
    return 0
