"""Plans steps: which sequences compute which tokens next.

There is no prefill phase and no decode phase. Each sequence has a number of known tokens and a number of scheduled
tokens, and each step schedules some of the tokens that are known but not scheduled, as many as one token budget allows.
This covers chunked prefill, prefix hits, preemption and resumption. The `lanes` fill the plan of a step one after the
other: first the running sequences, then the waiting ones, and before, between or after them the special cases.

Steps may be planned ahead: `schedule` treats plans in flight as if they had been applied, and the worker takes tokens
that the core does not know yet from its own row. A sequence in flight is not preempted: the sequence that lacks blocks,
and all younger ones, are left out of the plan instead.

With several pipeline stages, plans in flight are computed at the same time, so they have different sequences: a plan
leaves out sequences whose next token is sampled by a plan in flight, and takes an equal part of the decoding sequences,
oldest first (`step_builder.part_of`). Chunks of one prompt may be in successive plans, as each stage computes the plans
in order. For a sequence with log probabilities of its prompt, the whole prompt is computed, in chunks whose logits have
a bounded size.

Not here: stop conditions and results (`core`), rows and blocks (`residency`). Called by `core`.
"""

import math

from antiphon.services.engine.core.lanes import LANES
from antiphon.services.engine.core.lanes.admission import Admission
from antiphon.services.engine.core.lanes.lane import Lane, Shared
from antiphon.services.engine.core.plan import CoreLimits, EngineFacts, StepPlan
from antiphon.services.engine.core.policy.speculation import SpeculationController
from antiphon.services.engine.core.policy.step_times import StepTimes
from antiphon.services.engine.core.residency import Residency
from antiphon.services.engine.core.sequence import Sequence, Status
from antiphon.services.engine.core.step_builder import StepBuilder, joining, part_of
from antiphon.shared.messages import EngineCounters


class Scheduler:
    """Owns the lanes and the clocks of the steps; `residency` is shared with `core`."""

    def __init__(
        self,
        limits: CoreLimits,
        facts: EngineFacts,
        residency: Residency,
        tally: EngineCounters,
        prompt_logprobs: int,
    ) -> None:
        """`prompt_logprobs`: maximum number of a step's prompt tokens with reported log probabilities."""
        self._limits = limits
        self._residency = residency
        self._tally = tally
        self._prompt_logprobs = prompt_logprobs
        self._num_stages = num_stages = facts.num_stages
        self._times = StepTimes()
        self._speculation = None
        if limits.num_speculative_tokens:
            self._speculation = SpeculationController(self._times, predicts=facts.has_draft_layer)
        self._admission = Admission(limits, residency)
        shared = Shared(
            limits=limits,
            num_stages=num_stages,
            residency=residency,
            admission=self._admission,
            times=self._times,
        )
        self.lanes: tuple[Lane, ...] = tuple(lane(shared) for lane in LANES)
        """In the order in which they schedule."""

    def add(self, sequence: Sequence) -> None:
        """Queues a new sequence."""
        self._lane_of(sequence).add(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Ends a sequence, running or waiting, see `Residency.finish`."""
        if sequence.status is Status.RUNNING:
            self._residency.finish(sequence)
            return
        sequence.move_to(Status.FINISHED)
        self._lane_of(sequence).forget(sequence)

    def schedule(self, now_s: float, *, urgent_canary: bool = False) -> StepPlan:
        """Plans a step. `urgent_canary`: see `Core.schedule`.

        An empty plan uses no step number, and freed rows and swap copies stay pending for the next plan.
        """
        builder = self._new_builder(now_s, urgent_canary)
        lanes = [lane for lane in self.lanes if not lane.sleeps]
        for lane in lanes:
            lane.begin(builder)
        builder.may_join = self._admission.opens(now_s)
        for lane in lanes:
            if not builder.closed or lane.takes_leftovers:
                lane.schedule(builder)
        return self._close(builder)

    def step_ended(self, step: int, now_s: float, num_accepted: int, draft_s: float = 0.0) -> None:
        """Records that a step has ended, with `num_accepted` accepted draft tokens in all.

        `draft_s`: see `StepResult`.
        The caller then calls `Residency.apply_result` for each sequence of the step.
        """
        self._admission.step_ended(step, now_s)
        ended = self._times.ended(step, now_s, draft_s)
        if self._speculation is not None:
            self._speculation.step_ended(ended, num_accepted, draft_s)

    def seconds_to_batch(self, now_s: float) -> float:
        """Returns the seconds until a gathering batch must start (see `batching`); infinite if no batch gathers."""
        batches = self._admission.batches
        return math.inf if batches is None else batches.seconds_left(now_s)

    def _lane_of(self, sequence: Sequence) -> Lane:
        lane = next((lane for lane in self.lanes if lane.owns(sequence)), None)
        assert lane is not None, f"{sequence.sequence_id}: no lane for such a sequence"
        return lane

    def _new_builder(self, now_s: float, urgent_canary: bool) -> StepBuilder:
        self._residency.states.begin_plan(self._tally.step + 1)
        num_running = len(self._residency.running)
        speculation = self._speculation
        num_drafting = 0 if speculation is None else speculation.num_drafting(num_running, now_s)
        budget = self._limits.step_tokens(num_running, num_drafting)
        room = part_of(num_running, self._num_stages) if self._num_stages > 1 else budget
        return StepBuilder(
            step=self._tally.step + 1,
            budget=budget,
            prompt_logprobs=self._prompt_logprobs,
            now_s=now_s,
            room=room,
            num_drafting=num_drafting,
            predicts=speculation is not None and speculation.predicts(num_running, now_s),
            draft_cost=0.0 if speculation is None else speculation.draft_cost,
            predicts_prompts=speculation is not None and speculation.predicts_prompts(now_s),
            urgent_canary=urgent_canary,
        )

    def _close(self, builder: StepBuilder) -> StepPlan:
        if not builder.scheduled:
            return StepPlan(step=builder.step)
        self._admission.planned(builder)
        new = builder.joined if builder.canary is None else [*builder.joined, builder.canary]
        for sequence in new:
            self._residency.enter(sequence)
        self._tally.step = builder.step
        # Only steps in which every sequence decodes one token tell how long a token takes.
        num_sequences = len(builder.scheduled)
        decodes = builder.num_tokens == num_sequences + builder.num_draft_tokens
        self._times.planned(builder.step, builder.now_s, num_sequences, builder.num_draft_tokens, decodes=decodes)
        rows, swap = self._residency.rows, self._residency.swap
        swap_out, swap_in = swap.announce() if swap.out or swap.back else ((), ())
        return StepPlan(
            step=builder.step,
            freed_rows=rows.announce(),
            new=tuple(map(joining, [*new, *builder.refilled])),
            scheduled=tuple(builder.scheduled),
            swap_out=swap_out,
            swap_in=swap_in,
            copies=tuple(builder.copies),
            num_tokens=builder.num_tokens,
            num_prompt_logprobs=self._prompt_logprobs - builder.prompt_logprobs,
            adapters=rows.adapters.announce() if rows.adapters.filled else (),
        )
