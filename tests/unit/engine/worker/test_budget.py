"""What memory goes to what, and how a step's share follows from small ones."""

import dataclasses

import pytest
import torch

from antiphon.services.engine.core.plan import StepPlan
from antiphon.services.engine.worker.capacity import budget, host_cache, profile
from antiphon.services.engine.worker.capacity.budget import (
    FREE_SHARE_MAX,
    Backend,
    cpu_budget,
    device_budget,
    plan_measured,
    plan_memory,
)
from antiphon.services.engine.worker.capacity.kv_cache import KvPlan
from antiphon.services.engine.worker.capacity.profile import StepBytes, largest_step, make_probe, measure_step
from antiphon.shared.config import EngineSettings
from tests.unit.engine.worker.test_kv_cache import BLOCK_BYTES, DESCRIPTION

MIB, GIB = 2**20, 2**30
CPU = torch.device("cpu")


def with_free(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    for module in (budget, host_cache):
        monkeypatch.setattr(module, "free_bytes", lambda: size)


@pytest.mark.spec("S-SRV-040")
def test_on_a_cpu_it_is_the_share_of_the_configured_cache_and_at_most_of_what_steps_leave(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_free(monkeypatch, 1000 * MIB)
    assert cpu_budget(EngineSettings(kv_cache_memory_gb=0.5), 0).asked_bytes == int(0.45 * GIB)
    assert cpu_budget(EngineSettings(kv_cache_memory_gb=0.5, gpu_memory_utilization=0.5), 0).asked_bytes == GIB // 4
    tight = cpu_budget(EngineSettings(kv_cache_memory_gb=4.0), 400 * MIB)
    assert tight.asked_bytes == tight.most_bytes == int(600 * MIB * FREE_SHARE_MAX)
    assert cpu_budget(EngineSettings(), 2000 * MIB).asked_bytes == 0


def test_cache_swap_space_and_steps_together_fit_into_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    for free in (2 * MIB, 50 * MIB, 4 * GIB):
        with_free(monkeypatch, free)
        plan = plan_memory(
            EngineSettings(max_num_seqs=100, block_size=16),
            DESCRIPTION,
            torch.float32,
            CPU,
            StepBytes(100 * 1024, 256, 0),
        )
        assert plan.total_bytes - plan.held_bytes <= free
        assert plan.cache_bytes == plan.kv.num_blocks * BLOCK_BYTES
        assert plan.num_host_blocks > 0


def test_weights_that_are_mapped_are_not_free_though_the_system_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with_free(monkeypatch, GIB)
    settings, step = EngineSettings(max_num_seqs=100_000, kv_cache_memory_gb=4.0), StepBytes(MIB, 256, 0)
    caches = [
        plan_memory(settings, DESCRIPTION, torch.float32, CPU, step, mapped).cache_bytes for mapped in (0, GIB // 2)
    ]
    assert caches[0] - caches[1] == pytest.approx(FREE_SHARE_MAX * GIB / 2, abs=BLOCK_BYTES * 16)
    assert caplog.text.count("of the 3.6 GiB that --kv-cache-memory-gb gives the KV cache, at most 0.") == 2


@pytest.mark.spec("S-SRV-032")
def test_a_context_whose_attention_alone_takes_all_memory_is_shortened(monkeypatch: pytest.MonkeyPatch) -> None:
    with_free(monkeypatch, 100 * MIB)
    own = dataclasses.replace(DESCRIPTION, max_positions=2**20)
    plan = plan_memory(
        EngineSettings(max_num_seqs=2, block_size=16), own, torch.float32, CPU, StepBytes(MIB, 256, 10_000)
    )
    assert 1000 < plan.kv.max_model_len < 100 * MIB // 10_000
    assert plan.total_bytes - plan.held_bytes <= 100 * MIB


def test_the_largest_step_has_guesses_and_whole_prompts() -> None:
    def bounds(**flags: object) -> tuple[int, int, int]:
        step = largest_step(EngineSettings(max_num_seqs=8, **flags), DESCRIPTION)  # type: ignore[arg-type]
        return step.num_tokens, step.num_rows, step.num_samples

    assert bounds() == (2048, 8, 8)
    assert bounds(max_num_batched_tokens=20, enable_chunked_prefill=False) == (256, 8, 8)
    assert bounds(use_lookahead=True, num_speculative_tokens=3) == (2048, 8, 32)
    assert bounds(use_lookahead=True, num_speculative_tokens=3, max_num_batched_tokens=20) == (20, 8, 20)


def test_what_small_steps_take_is_scaled_up_to_the_largest(monkeypatch: pytest.MonkeyPatch) -> None:
    bounds = largest_step(EngineSettings(max_num_seqs=640), DESCRIPTION)
    probe = make_probe(bounds, DESCRIPTION, 16, CPU)
    ran: list[StepPlan] = []
    peaks = iter([1000, 2000, 50_000, 82_000])
    monkeypatch.setattr(profile, "peak_growth", lambda work: work() or next(peaks))
    step = measure_step(probe, ran.append, 7, CPU)
    assert [(plan.num_tokens, len(plan.scheduled)) for plan in ran] == [
        (32, 32),
        (256, 1),
        (64, 64),
        (32, 32),
        (32, 32),
        (64, 64),
    ]
    fixed = 1000 * 2048 // 256 + 2000 * 640 // 32 + 82_000 + (640 - 64) * 1000
    assert probe.reported_bytes == 6 * 256 * DESCRIPTION.vocab_size
    assert step.at(256) == fixed + probe.reported_bytes
    assert step.at(300) == step.at(256) + 44 * 7
    places = [block for new in ran[1].new for block in new.block_ids]
    assert len(places) == 16
    assert max(places) < probe.kv.num_blocks


def test_where_all_rows_are_sampled_at_once_a_guess_takes_a_rows_share_of_that(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = EngineSettings(max_num_seqs=8, use_lookahead=True, num_speculative_tokens=3)
    probe = make_probe(largest_step(settings, DESCRIPTION), DESCRIPTION, 16, CPU)
    assert (probe.few.num_tokens, probe.many.num_tokens, probe.unseen_rows) == (8, 8, 24)
    peaks = iter([0, 0, 80_000, 80_000])
    monkeypatch.setattr(profile, "peak_growth", lambda work: work() or next(peaks))
    assert measure_step(probe, lambda _: None, 0, CPU).at(0) == 80_000 + 24 * 10_000 + probe.reported_bytes


def test_on_a_device_the_largest_step_itself_is_measured() -> None:
    bounds = largest_step(EngineSettings(max_num_seqs=640, max_num_batched_tokens=700), DESCRIPTION)
    probe = make_probe(bounds, DESCRIPTION, 16, torch.device("cuda"))
    assert (probe.drawing.num_tokens, probe.many.num_tokens, probe.unseen_rows) == (640, 640, 0)
    assert (probe.passing.num_tokens, probe.more_tokens, probe.kv.max_model_len) == (256, 700 / 256, 256)


@pytest.mark.spec("S-SRV-040")
def test_on_a_device_it_is_what_others_and_a_step_leave_of_the_share() -> None:
    half = EngineSettings(gpu_memory_utilization=0.5)
    budget = device_budget(half, free_bytes=70 * GIB, total_bytes=80 * GIB, step_bytes=4 * GIB)
    assert (budget.asked_bytes, budget.most_bytes) == ((40 - 10 - 4) * GIB, (70 - 4) * GIB)
    full = device_budget(half, free_bytes=3 * GIB, total_bytes=80 * GIB, step_bytes=4 * GIB)
    assert (full.asked_bytes, full.most_bytes) == (0, 0)


class Device:
    """A CUDA device as its allocator reports it: what each step takes beside the cache, in the order of the steps.

    There is none where the tests run; what is tested is how the plan follows from what it reports.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, steps: list[int]) -> None:
        self.states: list[KvPlan] = []
        self._steps, self._peak = iter(steps), 0
        for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
            monkeypatch.setattr(torch.cuda, name, lambda *_: None)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: self._cache_bytes())
        monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda _: self._cache_bytes() + self._peak)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (60 * MIB - self._cache_bytes(), 100 * MIB))

    def make_state(self, kv: KvPlan, num_host_blocks: int) -> None:
        self.states.append(kv)

    def run(self, plan: StepPlan) -> None:
        self._peak = next(self._steps)

    def _cache_bytes(self) -> int:
        return self.states[-1].num_blocks * BLOCK_BYTES


def test_on_a_device_the_cache_gets_what_measured_steps_and_graphs_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    with_free(monkeypatch, GIB)
    passing, drawing, few, many = 3 * MIB, 2 * MIB, MIB, MIB
    device = Device(monkeypatch, [passing, many, drawing, few, many])
    settings = EngineSettings(gpu_memory_utilization=0.9, block_size=16, max_num_seqs=10_000, max_num_batched_tokens=1)
    backend = Backend(
        description=dataclasses.replace(DESCRIPTION, max_positions=100_000), device=torch.device("cuda"),
        cache_dtype=torch.float32,
        make_state=device.make_state, run=device.run, context_token_bytes=lambda _: 0, kept_bytes=7 * MIB,
    )  # fmt: skip
    plan = plan_measured(settings, backend)
    assert device.states[1:] == [KvPlan(1, 1), plan.kv]
    # Log probabilities of prompts take the logits of as many tokens as a step has room for.
    reported = 10 * 256 * DESCRIPTION.vocab_size
    assert plan.step_bytes == passing + drawing + many + reported + 7 * MIB
    left = int(90 * MIB) - 40 * MIB - BLOCK_BYTES - plan.step_bytes
    assert plan.cache_bytes == left // BLOCK_BYTES * BLOCK_BYTES


def test_steps_under_an_interpreter_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    with_free(monkeypatch, GIB)
    states: list[KvPlan] = []
    backend = Backend(
        description=DESCRIPTION, device=CPU, cache_dtype=torch.float32, make_state=lambda kv, _: states.append(kv),
        run=lambda _: pytest.fail("a step"), context_token_bytes=lambda _: 0, measures=False,
    )  # fmt: skip
    plan = plan_measured(EngineSettings(max_num_seqs=2, block_size=16), backend)
    assert states == [plan.kv]
    assert plan.step_bytes == 0
