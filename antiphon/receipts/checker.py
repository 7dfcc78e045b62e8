"""Runs a model in this process to check given outputs: which tokens would it have chosen?

The expected tokens are the draft tokens of the sequence (`SequenceSpec.expected_token_ids`), so that a step computes
many of them at once, and the rule that accepts drafts says how many are right. Penalties, grammars and all other
parameters have their effect as in generation. This takes as many steps as the output has hundreds of tokens.

Nothing here knows receipts: `verdict` compares.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from antiphon.offline.engine_args import EngineArgs, engine_args
from antiphon.services.engine.core.request import Outcome, SequenceSpec
from antiphon.services.engine.engine import Engine
from antiphon.services.engine.steps.loop import StepReport
from antiphon.shared.errors import ServiceError
from antiphon.shared.flags import SettingsError
from antiphon.shared.messages import FinishReason
from antiphon.shared.models.model_files import located
from antiphon.shared.parameters.sampling import SamplingParams, check, check_vocabulary

CHUNK_TOKENS = 127
"""Expected tokens that a step checks of one sequence. More of them would need more memory for their logits and save
little time."""
ROWS = 2
"""Outputs that are checked at the same time."""
DIFFERENCES_MAX = 64
"""Differences after which an output is not checked any further."""
_WAIT_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedOutput:
    """An output to check. Without `token_ids` it is generated instead, which takes longer."""

    prompt_token_ids: Sequence[int]
    params: SamplingParams
    """As the engine got them, with the seed of this output."""
    token_ids: Sequence[int] | None
    num_begun: int = 0
    """Number of its leading tokens that were given and are not checked."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The model's token at a position of the output where another was expected; None: its output ends before it."""

    position: int
    token_id: int | None


@dataclass(slots=True, kw_only=True)
class CheckedOutput:
    """What the model says of an output. `token_ids`: the tokens before the first difference, or all that it made."""

    token_ids: list[int] = field(default_factory=list[int])
    differences: list[Difference] = field(default_factory=list[Difference])
    finish_reason: FinishReason | None = None
    """Why its output ends with the last token; None: it would go on."""
    num_checked: int = 0
    """Number of tokens that were compared."""
    error: str = ""


class _NoClock:
    """A clock that stands still, for a core without one: then drafts are not limited by the time that they save."""

    def monotonic(self) -> float:
        return 0.0

    def time_ns(self) -> int:
        return 0


class Checker:
    """A model in this process. The constructor loads it, which takes seconds.

    `settings`: names and values of the engine's settings, such as `dtype`. Raises SettingsError if it cannot be loaded.
    """

    def __init__(self, model: str, **settings: object) -> None:
        self._reports: list[StepReport] = []
        try:
            self.args: EngineArgs = engine_args(
                model=model,
                max_num_seqs=ROWS,
                use_lookahead=True,
                use_v2_block_manager=True,
                num_speculative_tokens=CHUNK_TOKENS,
                swap_space=0,
                **settings,
            )
            self.settings = located(self.args.settings())
            self.engine = Engine.build(self.settings, self._reports.append, clock=_NoClock())
        except (ServiceError, ValueError) as error:
            raise SettingsError(f"--model: {error}") from error
        self._num_added = 0

    def close(self) -> None:
        """Frees the model's memory."""
        self.engine.close()

    def check(self, outputs: Sequence[ExpectedOutput], *, forgiving: bool = False) -> list[CheckedOutput]:
        """Returns what the model says of each output.

        `forgiving`: whether an output is checked beyond its first difference, with the expected tokens before each
        position, up to `DIFFERENCES_MAX` differences.
        """
        vocab_size = self.engine.facts.vocab_size
        made = [_Run(one, vocab_size, forgiving=forgiving) for one in outputs]
        checked = [run.checked for run in made]
        runs = deque(run for run in made if not run.checked.error)
        running: dict[str, _Run] = {}
        while runs or running:
            while runs and len(running) < ROWS:
                self._add(runs.popleft(), running)
            if not self.engine.step():
                self.engine.wait(_WAIT_S)
            for run in self._take(running):
                self._add(run, running)
        return checked

    def _add(self, run: "_Run", running: "dict[str, _Run]") -> None:
        self._num_added += 1
        name = f"check-{self._num_added}"
        running[name] = run
        self.engine.add(run.spec(name, self._num_added))

    def _take(self, running: "dict[str, _Run]") -> Iterable["_Run"]:
        """Applies the reports. Returns the outputs that go on after a difference."""
        again = list[_Run]()
        for report in self._reports:
            for name, error in report.refused:
                if (run := running.pop(name, None)) is not None:
                    run.checked.error = error.message
            for outcome in report.outcomes:
                run = running.get(outcome.sequence_id)
                if run is None or not run.take(outcome):
                    continue
                del running[outcome.sequence_id]
                if outcome.finish_reason is None:
                    self.engine.abort(outcome.sequence_id)
                if run.goes_on:
                    again.append(run)
        self._reports.clear()
        return again


class _Run:
    """One output while it is checked."""

    def __init__(self, expected: ExpectedOutput, vocab_size: int, *, forgiving: bool) -> None:
        self._expected, self._forgiving = expected, forgiving
        self._num_given = expected.num_begun
        """Number of leading tokens that the engine takes for granted."""
        self._has_token_ids = expected.token_ids is not None
        self._tokens = tuple(expected.token_ids or ())
        unknown = next((i for i, one in enumerate(self._tokens) if not 0 <= one < vocab_size), len(self._tokens))
        self._drafts = self._tokens[:unknown]
        """The tokens before the first one that the model does not have: only these may be computed."""
        self.checked = CheckedOutput(token_ids=list(self._tokens[: expected.num_begun]))
        self.goes_on = False
        if not all(0 <= one < vocab_size for one in expected.prompt_token_ids) or unknown < expected.num_begun:
            self.checked.error = f"The prompt has a token outside the vocabulary of {vocab_size} tokens."
            return
        try:
            check(expected.params)
            check_vocabulary(expected.params, vocab_size)
        except ServiceError as error:
            self.checked.error = error.message

    def spec(self, name: str, arrival: int) -> SequenceSpec:
        """Returns the sequence that checks what comes after the tokens that are taken for granted."""
        self.goes_on = False
        return SequenceSpec(
            sequence_id=name,
            prompt_token_ids=tuple(self._expected.prompt_token_ids),
            params=self._expected.params,
            output_token_ids=self._tokens[: self._num_given],
            expected_token_ids=self._drafts,
            arrival=arrival,
        )

    def take(self, outcome: Outcome) -> bool:
        """Compares new tokens. Returns whether the sequence is no longer needed."""
        if not self._has_token_ids:
            self.checked.token_ids += outcome.token_ids
            self.checked.finish_reason = outcome.finish_reason
            self.checked.num_checked += len(outcome.token_ids)
            return outcome.finish_reason is not None
        end = len(self._tokens)
        for position, token_id in enumerate(outcome.token_ids, outcome.position):
            if position >= end:
                return True
            self.checked.num_checked += 1
            if token_id != self._tokens[position]:
                return self._differs(position, token_id)
            if not self.checked.differences:
                self.checked.token_ids.append(token_id)
        known = outcome.position + len(outcome.token_ids)
        if outcome.finish_reason is not None and known < end:
            return self._differs(known, None)
        if known >= end:
            self.checked.finish_reason = outcome.finish_reason
        # A sequence that would go on is asked for one token more, so that the end is known: that of its last step.
        return outcome.finish_reason is not None or known >= end

    def _differs(self, position: int, token_id: int | None) -> bool:
        self.checked.differences.append(Difference(position, token_id))
        self._num_given = position + 1
        is_known = self._num_given <= len(self._drafts) and self._num_given < len(self._tokens)
        self.goes_on = self._forgiving and is_known and len(self.checked.differences) < DIFFERENCES_MAX
        return True
