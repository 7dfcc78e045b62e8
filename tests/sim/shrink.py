"""Cuts a failing plan down: leaves out faults and requests as long as the run still fails."""

from collections.abc import Callable
from dataclasses import replace

from tests.sim.plan import Plan


def shrink(plan: Plan, fails: Callable[[Plan], bool], most: int = 300) -> Plan:
    """The smallest failing plan that leaving out parts finds, after at most `most` runs."""
    runs = 0
    for name in ("faults", "loads"):
        size = max(1, len(getattr(plan, name)) // 2)
        while size:
            start = 0
            while start < len(getattr(plan, name)) and runs < most:
                parts = getattr(plan, name)
                smaller = replace(plan, **{name: parts[:start] + parts[start + size :]})
                runs += 1
                if fails(smaller):
                    plan = smaller
                else:
                    start += size
            size //= 2
    return plan
