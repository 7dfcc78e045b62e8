"""What an engine makes of its settings once it knows its model."""

import dataclasses
from typing import Any

import pytest

from services.engine.core.plan import EngineFacts
from services.engine.service import EngineService, core_limits
from shared.actors.service import EXIT_CONFIG, main
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


@pytest.mark.spec("S-SRV-046", "S-SRV-052")
def test_prefix_caching_and_chunked_prefill_are_on_and_can_be_switched_off() -> None:
    on = core_limits(EngineSettings(), FACTS)
    assert (on.enable_prefix_caching, on.enable_chunked_prefill) == (True, True)
    off = core_limits(EngineSettings(enable_prefix_caching=False, enable_chunked_prefill=False), FACTS)
    assert (off.enable_prefix_caching, off.enable_chunked_prefill) == (False, False)


CHOICES = [item for item in dataclasses.fields(EngineSettings) if item.metadata["choices"]]


@pytest.mark.spec("S-SRV-107")
@pytest.mark.parametrize("item", CHOICES, ids=lambda item: item.name)
def test_a_choice_that_is_none_ends_the_process_with_78_and_the_allowed_values(
    item: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    flag = f"--{item.name.replace('_', '-')}"
    assert main("engine", EngineSettings, EngineService, [f"{flag}=no-such"]) == EXIT_CONFIG == 78
    printed = capfd.readouterr().err
    assert all(text in printed for text in (flag, "no-such", *item.metadata["choices"])), printed


@pytest.mark.spec("S-SRV-056", "S-SRV-102")
def test_lookahead_needs_the_v2_block_manager_and_says_so() -> None:
    with pytest.raises(SettingsError, match="--use-lookahead needs --use-v2-block-manager: add it"):
        EngineService(EngineSettings(use_lookahead=True))
    EngineService(EngineSettings(use_lookahead=True, use_v2_block_manager=True))
    EngineService(EngineSettings(use_v2_block_manager=True))


@pytest.mark.spec("S-SRV-058")
def test_eight_tokens_are_guessed_unless_told_otherwise_and_none_without_lookahead() -> None:
    def guesses(**settings: Any) -> int:
        return core_limits(EngineSettings(**settings), FACTS).num_speculative_tokens

    assert guesses(use_lookahead=True) == 8
    assert guesses(use_lookahead=True, num_speculative_tokens=12) == 12
    assert guesses(num_speculative_tokens=12) == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        pytest.param("--kv-cache-ratio=1.5", "1.5 is not between 0 and 1", marks=pytest.mark.spec("S-SRV-043")),
        ("--kv-cache-ratio=-0.1", "-0.1 is not between 0 and 1"),
        pytest.param("--swap-space=-1", "-1.0 is not at least 0", marks=pytest.mark.spec("S-SRV-044")),
        ("--swap-space=inf", "inf is not at least 0"),
        ("--scheduler-delay-factor=-1", "-1.0 is not at least 0"),
        ("--scheduler-delay-factor=nan", "nan is not at least 0"),
    ],
)
def test_an_impossible_value_ends_the_process_with_78_and_what_is_allowed(
    words: str, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main("engine", EngineSettings, EngineService, [words]) == EXIT_CONFIG
    assert f"{words.partition('=')[0]}: {said}" in capfd.readouterr().err
