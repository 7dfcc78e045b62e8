"""What an engine makes of its settings once it knows its model."""

import asyncio
import dataclasses
import subprocess
import sys
import threading
from typing import Any

import pytest

from antiphon.services.engine.core.core import Core
from antiphon.services.engine.core.plan import EngineFacts, StepPlan, StepResult
from antiphon.services.engine.engine import core_limits, with_present_names
from antiphon.services.engine.service import EngineService
from antiphon.shared.actors.host import Host
from antiphon.shared.actors.service import EXIT_CONFIG, main
from antiphon.shared.clock import SystemClock
from antiphon.shared.config import EngineSettings
from antiphon.shared.flags import SettingsError, flags_of
from antiphon.shared.subjects import Subjects
from tests.support.memory import MemoryBus
from tests.unit.engine.core.factories import answer, prompt_of, spec

FACTS = EngineFacts(num_blocks=1000, block_size=16, max_model_len=4096, vocab_size=300, eos_token_ids=frozenset())
"""A context of 4096 tokens."""


def budget(**settings: Any) -> int:
    return core_limits(EngineSettings(**settings), FACTS).max_num_batched_tokens


def test_the_budget_of_a_step_is_large_enough_for_what_has_to_fit() -> None:
    assert budget() == 2048
    assert budget(enable_chunked_prefill=False) == 4096
    assert budget(max_num_seqs=3000) == 3000
    assert budget(max_num_batched_tokens=256) == 256
    assert budget(max_num_batched_tokens=5000, enable_chunked_prefill=False) == 5000


def test_a_backend_bounds_the_prompts_of_a_step_unless_the_flag_says_how_many_tokens() -> None:
    facts = dataclasses.replace(FACTS, step_prompt_tokens=100)
    limits = core_limits(EngineSettings(), facts)
    assert (limits.max_num_batched_tokens, limits.step_prompt_tokens) == (2048, 100)
    assert core_limits(EngineSettings(max_num_batched_tokens=700), facts).step_prompt_tokens is None
    assert core_limits(EngineSettings(enable_chunked_prefill=False), facts).step_prompt_tokens is None


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


CHOICES = [item for item in flags_of(EngineSettings) if item.metadata["choices"]]


@pytest.mark.spec("S-SRV-107:present", "S-SRV-107:quantization", "S-SRV-107:distributed-executor-backend")
@pytest.mark.parametrize("item", CHOICES, ids=lambda item: item.name)
def test_a_choice_that_is_none_ends_the_process_with_78_and_the_allowed_values(
    item: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    assert {"quantization", "distributed_executor_backend"} < {choice.name for choice in CHOICES}
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


@pytest.mark.spec("S-SRV-028")
def test_the_only_task_is_to_generate(capfd: pytest.CaptureFixture[str]) -> None:
    assert EngineSettings().task == "generate"
    assert main("engine", EngineSettings, EngineService, ["--task=embed"]) == EXIT_CONFIG
    printed = capfd.readouterr().err
    assert "--task" in printed
    assert "choose from generate" in printed.replace("'", "")


@pytest.mark.spec("S-SRV-015")
@pytest.mark.parametrize(("limit", "rows"), [(None, 8), (3, 3), (8, 8), (100, 8)])
def test_an_engine_works_on_no_more_than_its_limit_and_the_others_wait_their_turn(limit: int | None, rows: int) -> None:
    bounds = core_limits(EngineSettings(max_num_seqs=8, limit_worker_concurrency=limit), FACTS)
    core = Core(bounds, FACTS)
    for number in range(20):
        core.add(spec(f"s{number}", prompt_of(5, 7 * number), max_tokens=3))
    most = ended = 0
    while core.sequences:
        plan = core.schedule()
        most = max(most, core.load().num_running)
        ended += sum(one.finish_reason == "length" for one in core.apply(plan, answer(plan)))
    assert most == rows
    assert ended == 20


@pytest.mark.spec("S-SRV-059", "S-SRV-060")
@pytest.mark.parametrize(
    ("settings", "size", "wait_s"),
    [
        ({}, None, 0.1),
        ({"max_batch_size": 4}, 4, 0.1),
        ({"batch_wait_timeout": 0.5}, 16, 0.5),
        ({"batch_wait_timeout": 0.0}, 16, 0.0),
        ({"max_batch_size": 1, "batch_wait_timeout": 2.0}, 1, 2.0),
    ],
)
def test_requests_gather_into_batches_of_16_for_a_tenth_of_a_second_unless_told_otherwise_or_not_at_all(
    settings: dict[str, Any], size: int | None, wait_s: float
) -> None:
    bounds = core_limits(EngineSettings(**settings), FACTS)
    assert (bounds.max_batch_size, bounds.batch_wait_timeout) == (size, wait_s)


@pytest.mark.spec("S-SRV-081:cpu", "S-SRV-082:name")
def test_the_former_name_of_the_longest_captured_sequence_still_counts_and_is_deprecated(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert with_present_names(EngineSettings()) == EngineSettings(max_seq_len_to_capture=8192)
    assert not caplog.text
    assert with_present_names(EngineSettings(max_context_len_to_capture=64)).execution.max_seq_len_to_capture == 64
    assert "--max-context-len-to-capture is deprecated" in caplog.text


@pytest.mark.parametrize(
    ("word", "said"),
    [
        pytest.param("--max-seq-len-to-capture=0", "0 is not at least 1", marks=pytest.mark.spec("S-SRV-081:cpu")),
        pytest.param("--max-context-len-to-capture=0", "0 is not at least 1", marks=pytest.mark.spec("S-SRV-082:name")),
        pytest.param("--enforce-eager=maybe", "'maybe' is not one of 0, 1", marks=pytest.mark.spec("S-SRV-080:cpu")),
        pytest.param("--limit-worker-concurrency=0", "0 is not at least 1", marks=pytest.mark.spec("S-SRV-015")),
        pytest.param("--max-batch-size=0", "0 is not at least 1", marks=pytest.mark.spec("S-SRV-059")),
        pytest.param("--batch-wait-timeout=-1", "-1.0 is not at least 0", marks=pytest.mark.spec("S-SRV-060")),
    ],
)
def test_an_impossible_bound_ends_the_process_with_78(word: str, said: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main("engine", EngineSettings, EngineService, [word]) == EXIT_CONFIG
    printed = capfd.readouterr().err
    assert word.partition("=")[0] in printed
    assert said in printed


class HeldWorker:
    """Runs its first step when it is let go."""

    def __init__(self) -> None:
        self.entered, self.go = threading.Event(), threading.Event()
        self.steps = 0

    def facts(self) -> EngineFacts:
        return FACTS

    def run(self, plan: StepPlan) -> StepResult:
        self.entered.set()
        self.go.wait()
        self.steps += 1
        return answer(plan)

    def close(self) -> None:
        pass


@pytest.mark.spec("S-SRV-061")
async def test_an_engine_has_started_only_when_it_is_warm() -> None:
    """What the process announces and prints as ready comes after `start`."""
    bus, worker = MemoryBus(), HeldWorker()
    transport = bus.connect("engine")
    service = EngineService(EngineSettings(use_warmup=True), lambda _settings: worker)
    starting = asyncio.create_task(
        service.start(Host(transport=transport, subjects=Subjects(), clock=SystemClock(), id="e1", instance_id="b1"))
    )
    assert await asyncio.to_thread(worker.entered.wait, 20.0)
    assert not starting.done()
    worker.go.set()
    await starting
    assert worker.steps > 1
    running = asyncio.create_task(service.run())
    await service.drain()
    await running
    await transport.close()


def test_the_service_imports_torch_only_while_it_loads_a_model() -> None:
    """Else importing torch, most of the start-up time, would come before the service connects to the bus."""
    code = "import sys, antiphon.services.engine.__main__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
