"""The settings by which engines test themselves."""

from shared.flags import NOT_NEGATIVE, flag
from shared.settings.base import Settings


class SelfTestSettings(Settings):
    """See `docs/second-opinion.md`."""

    canary_interval: float = flag(
        2.0,
        "seconds between two runs of the hidden test sequence by which an engine detects wrong results; longer for "
        "large models, so that it takes 1 percent of the time (0: no test sequence and no checks of the weights)",
        rule=NOT_NEGATIVE,
        group="engine: execution",
    )
    deterministic: bool = flag(
        False,
        "start only if the tokens of a request cannot depend on other requests (the CPU backend); a request that moves "
        "to another engine continues only on one with the same numerics",
        group="engine: execution",
    )
