"""What an engine makes of its settings once it knows its model."""

from typing import Any

import pytest

from services.engine.core.plan import EngineFacts
from services.engine.service import core_limits
from shared.config import EngineSettings, SettingsError

FACTS = EngineFacts(1000, 16, 4096, 300, frozenset())
"""A context of 4096 tokens."""


def budget(**settings: Any) -> int:
    return core_limits(EngineSettings(**settings), FACTS).max_num_batched_tokens


def test_the_budget_of_a_step_is_large_enough_for_what_has_to_fit() -> None:
    assert budget() == 2048
    assert budget(enable_chunked_prefill=False) == 4096
    assert budget(max_num_seqs=3000) == 3000
    assert budget(max_num_batched_tokens=256) == 256
    assert budget(max_num_batched_tokens=5000, enable_chunked_prefill=False) == 5000


@pytest.mark.spec("S-SRV-051", "S-SRV-100")
@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_batched_tokens": 4095, "enable_chunked_prefill": False},
        {"max_num_batched_tokens": 255, "max_num_seqs": 256},
    ],
)
def test_a_budget_that_is_too_small_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match=f"--max-num-batched-tokens: {settings['max_num_batched_tokens']} "):
        core_limits(EngineSettings(**settings), FACTS)
