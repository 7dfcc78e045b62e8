"""The command `antiphon plan`: reads the flags of `serve`, and calls `antiphon.advice.sizing`, which imports torch."""

import argparse

from antiphon.shared.config import check_engine
from antiphon.shared.flags import parse
from antiphon.terminal.exit_codes import Exit
from antiphon.terminal.output import show


def run(options: argparse.Namespace) -> int:
    """Prints the plan. Returns 1 if the model fits nowhere with these flags: not on the named card, or on none at all.

    Raises SettingsError for an invalid model, setting or card.
    """
    from antiphon.advice import sizing
    from antiphon.settings import ServeSettings

    card = sizing.chosen_card(options.gpu, options.memory_gb)
    settings = parse(ServeSettings, options)
    check_engine(settings)
    plan = sizing.make_plan(settings, card)
    show(plan.as_json(), plan.lines, as_json=options.json)
    return Exit.OK if plan.fits else Exit.FAILED
