"""The limit of open descriptors: raised in a process of its own, because it cannot be lowered again."""

import subprocess
import sys

import pytest

SHOWN = """
import resource
from antiphon.shared.actors import descriptors
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
print(descriptors.raise_limit(), *resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(("soft", "hard"), [(64, 200), (200, 200)])
def test_the_limit_is_raised_as_far_as_the_user_may(soft: int, hard: int) -> None:
    shown = subprocess.check_output([sys.executable, "-c", SHOWN.format(soft=soft, hard=hard)], text=True)
    assert shown.split() == ["200", "200", "200"]
