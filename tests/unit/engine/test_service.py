"""The engine service's settings: bounds of the scheduler from flags and from the model; what is refused."""

import dataclasses
from typing import Any

import pytest

from services.engine.core.plan import CoreLimits, EngineFacts
from services.engine.service import EngineService, core_limits
from shared.actors.service import EXIT_CONFIG, main
from shared.config import EngineSettings, SettingsError

FACTS = EngineFacts(num_blocks=64, block_size=16, max_model_len=4000, vocab_size=100)


def limits(**settings: object) -> CoreLimits:
    return core_limits(EngineSettings(**settings), FACTS)  # type: ignore[arg-type]


@pytest.mark.spec("S-SRV-051")
def test_the_token_budget_has_room_for_every_sequence_and_without_chunks_for_every_prompt() -> None:
    assert limits().max_num_batched_tokens == 2048
    assert limits(max_num_seqs=3000).max_num_batched_tokens == 3000
    assert limits(enable_chunked_prefill=False).max_num_batched_tokens == 4000
    assert limits(max_num_batched_tokens=300).max_num_batched_tokens == 300


@pytest.mark.spec("S-SRV-100")
def test_a_budget_below_the_models_context_is_refused_unless_prompts_are_split() -> None:
    assert limits(max_num_batched_tokens=3999).enable_chunked_prefill
    with pytest.raises(SettingsError, match=r"3999 is less than the context of 4000 tokens.*--enable-chunked-prefill"):
        limits(max_num_batched_tokens=3999, enable_chunked_prefill=False)


@pytest.mark.spec("S-SRV-046", "S-SRV-052")
def test_prefix_caching_and_chunked_prefill_are_on_and_can_be_switched_off() -> None:
    assert (limits().enable_prefix_caching, limits().enable_chunked_prefill) == (True, True)
    off = limits(enable_prefix_caching=False, enable_chunked_prefill=False)
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


def test_an_impossible_value_is_refused_before_a_model_is_loaded() -> None:
    for changes in ({"block_size": 24}, {"gpu_memory_utilization": 1.5}, {"num_gpu_blocks_override": 0}):
        with pytest.raises(SettingsError, match=next(iter(changes)).replace("_", "-")):
            EngineService(EngineSettings(**changes), lambda _settings: pytest.fail("a model was loaded"))
