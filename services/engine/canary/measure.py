"""Computes the canary's expected result before the engine serves, and checks that other sequences do not change it.

The sequences use a separate core, like those of `warmup`. Called by `engine`.
"""

import time
from dataclasses import dataclass, replace

from antiphon.services.engine.canary.probe import Observed, difference, digest, observed, probe_spec
from antiphon.services.engine.core.core import Core
from antiphon.services.engine.core.plan import CoreLimits, EngineFacts, StepPlan
from antiphon.services.engine.core.request import Outcome, SequenceSpec
from antiphon.services.engine.executor import Executor
from antiphon.shared.errors import ServiceError
from antiphon.shared.flags import SettingsError
from antiphon.shared.parameters.sampling import SamplingParams

TIMING_S = 0.1
"""The sequence is repeated for this long, and its fastest run is its duration, because other processes may be busy at
the start.
"""
BESIDE_MAX = 4
"""Number of other sequences in the check of batch invariance: enough to change the shapes of all matrix products."""


@dataclass(frozen=True, slots=True)
class Golden:
    """The value with which later runs are compared. `took_s`: duration of a run on the idle engine, seconds."""

    value: Observed
    exact: bool
    took_s: float

    @property
    def digest(self) -> str:
        """See `probe.digest`."""
        return digest(self.value, exact=self.exact)


def measure(executor: Executor, limits: CoreLimits) -> Golden | None:
    """Returns the golden value; None if the context is too short for the sequence.

    Raises ServiceError if two runs differ: the engine cannot be trusted.
    """
    facts = executor.facts()
    exact = not facts.variant_because
    first = _run(executor, limits, facts, 0)
    if first is None:
        return None
    took_s, ends_at = float("inf"), time.monotonic() + TIMING_S
    while took_s == float("inf") or time.monotonic() < ends_at:
        started = time.monotonic()
        again = _run(executor, limits, facts, 0)
        took_s = min(took_s, time.monotonic() - started)
        assert again is not None
        if told := difference(first, again, exact=exact):
            raise ServiceError("engine_failure", f"The engine computes the same sequence in two ways: {told}.")
    return Golden(first, exact, took_s)


def check_deterministic(executor: Executor, limits: CoreLimits) -> None:
    """Raises SettingsError if the engine's results depend on the batch (`--deterministic`).

    The backend must guarantee batch invariance, and a sequence must give the same bits alone and in a batch.
    """
    facts = executor.facts()
    if facts.variant_because:
        raise SettingsError(f"--deterministic: {facts.variant_because}; leave the option out or use the CPU backend")
    alone, beside = _run(executor, limits, facts, 0), _run(executor, limits, facts, BESIDE_MAX)
    if alone is None or beside is None:
        return
    if told := difference(alone, beside, exact=True):
        raise SettingsError(f"--deterministic: a sequence depends on what else is computed: {told}")


def _run(executor: Executor, limits: CoreLimits, facts: EngineFacts, num_beside: int) -> Observed | None:
    """Runs the canary, in steps with `num_beside` others, which sample, so that both code paths are tested."""
    core = Core(replace(limits, max_batch_size=None), facts)
    spec = probe_spec(facts, 0, core.checks.max_model_len)
    if spec is None:
        return None
    room = min(num_beside, limits.max_num_seqs) if facts.generates else 0
    for index in range(room):
        length = min(1 + 7 * index, core.checks.max_model_len - 8)
        if length >= 1:
            params = SamplingParams(max_tokens=8, temperature=float(index % 2), seed=index, ignore_eos=True)
            core.add(
                SequenceSpec(
                    sequence_id=f"beside {index}", prompt_token_ids=(index % facts.vocab_size,) * length, params=params
                )
            )
    core.add(spec)
    found: list[Outcome] = []
    while not (plan := core.schedule(urgent_canary=True)).empty:
        executor.launch(plan)
        core.apply(plan, executor.collect())
        found += core.canary_outcomes
        core.canary_outcomes.clear()
    # An empty plan frees the rows on the worker: the next core begins with all rows free.
    executor.launch(StepPlan(step=plan.step, freed_rows=core.residency.rows.announce()))
    executor.collect()
    return observed(found)
