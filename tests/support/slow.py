"""Parameters of tests of which `make test` runs a few and `make slow-test` the others."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_but(quick: Collection[Any], every: Iterable[Any]) -> list[Any]:
    """Returns the parameters `every`, of which all but those in `quick` are marked as slow.

    A tuple is the values of several arguments, or the first of them if `quick` has that.
    """

    def is_quick(one: Any) -> bool:
        return one in quick or (isinstance(one, tuple) and one[0] in quick)

    def values(one: Any) -> tuple[Any, ...]:
        return one if isinstance(one, tuple) else (one,)

    return [pytest.param(*values(one), marks=() if is_quick(one) else pytest.mark.slow) for one in every]
