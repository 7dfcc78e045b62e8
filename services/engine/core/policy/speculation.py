"""Decides whether draft tokens save time, by comparing the times of steps with and without drafts.

Draft tokens cost time whether they are accepted or not; how much depends on model, machine and batch. Steps that only
decode are therefore timed, and a balance is kept in seconds:

    plus     a small share (`COST_SHARE`) of every step's time, and for each accepted draft token the time of one token
    minus    the time of a step with drafts beyond the usual time of a step without, and the time of the draft layer

Sequences may draft only while the balance is positive, so drafts cost at most that share of the time, whatever the
text. The number of sequences that may draft in a step starts at one, doubles after every step that saved time and
returns to one after every step that lost time, so that trials are cheap in large batches too. With a draft layer, whose
time hardly depends on the number of sequences, all of them draft at once. Tokens that it has predicted are computed
even if its time has emptied the balance, since only that shows what they are worth.

The draft layer computes parts of prompts too, without which later predictions would be worse. These have a balance of
their own: their time is minus, a small share of all time and what drafts have saved is plus. If it is empty, prompts
are left out.

The caller passes the times; a time of 0 means that there is no clock, and then drafts are not limited. Used only by
`scheduler`.
"""

from antiphon.services.engine.core.policy.step_times import StepTimes, TimedStep

COST_SHARE = 0.01
"""Share of the total time that rejected draft tokens may cost."""
SAVED_STEPS_MAX = 4
"""Upper limit of the balance, in usual step times; that of prompts is in times of one prompt step. It limits the loss
when drafts begin to be rejected."""
OUTLIER = 3.0
"""A step with drafts is charged at most this many times the usual step time."""
WIDTH_MAX = 2**16
REFRESH_STEPS = 32
"""After this many steps with drafts, one step runs without, to keep the usual time up to date."""
FREE_PROMPTS = 8
"""Number of first steps with prompts that the draft layer takes part in for nothing: otherwise it might never be known
what its drafts are worth."""
PROMPT_FACTOR = 2.0
"""What the draft layer costs in a step with prompts, in its own time: the model's last layer then has to compute all
tokens to its end, not only those after which a token is sampled."""


KEPT = 0.95
"""What is left, after each step with drafts, of what is known about their cost."""


class SpeculationController:
    """The balance of one engine. `predicts`: whether its worker has a draft layer."""

    def __init__(self, times: StepTimes, *, predicts: bool = False) -> None:
        self._times = times
        self._has_layer = predicts
        self._balance_s = 0.0
        self._width = WIDTH_MAX if predicts else 1
        self._since_plain = 0
        self._has_predicted = False
        """Whether the last step that only decodes had the draft layer predict tokens."""
        self._prompts_s = 0.0
        """The balance of parts of prompts."""
        self._prompt_s = 0.0
        """The time of the draft layer in the latest step with prompts."""
        self._num_free = FREE_PROMPTS
        self._extra = self._drafts = 0.0
        """Of the last steps with drafts, what these have taken, in usual step times, and their number a sequence."""

    @property
    def draft_cost(self) -> float:
        """What a further draft costs, in usual step times: predicting and checking it. 0 while that is not known."""
        return self._extra / self._drafts if self._drafts else 0.0

    def num_drafting(self, num_sequences: int, now_s: float) -> int:
        """Returns how many of the running sequences may get draft tokens in the next step."""
        if not now_s:
            return num_sequences
        usual_s = self._times.usual_s(num_sequences)
        if usual_s is None or self._since_plain >= REFRESH_STEPS:
            return 0
        return self._width if self._balance_s > 0.0 or self._has_predicted else 0

    def predicts(self, num_sequences: int, now_s: float) -> bool:
        """Whether the draft layer may predict tokens after the next step."""
        if not self._has_layer or not now_s:
            return self._has_layer
        return self._balance_s > 0.0 and self._times.usual_s(num_sequences) is not None

    def predicts_prompts(self, now_s: float) -> bool:
        """Whether the draft layer may compute parts of prompts in the next step."""
        return self._has_layer and (not now_s or self._num_free > 0 or self._prompts_s > 0.0)

    def step_ended(self, ended: TimedStep | None, num_accepted: int, draft_s: float = 0.0) -> None:
        """Records the end of a step with `num_accepted` accepted draft tokens.

        `ended`: see `StepTimes.ended`. `draft_s`: time of the draft layer, in seconds.
        """
        if ended is None:
            return
        if not ended.decodes:
            self._prompt_ended(ended.spent_s, draft_s)
            return
        usual_s, limit_s = self._times.usual_s(ended.num_sequences), ended.spent_s
        if usual_s is not None and (draft_s or ended.num_draft_tokens):
            extra_s = draft_s + (max(0.0, ended.spent_s - usual_s) if ended.num_draft_tokens else 0.0)
            self._extra = KEPT * self._extra + min(extra_s / usual_s, OUTLIER)
            self._drafts = KEPT * self._drafts + ended.num_draft_tokens / ended.num_sequences
        gain_s = COST_SHARE * ended.spent_s - min(draft_s, OUTLIER * (usual_s or limit_s))
        if not ended.num_draft_tokens:
            self._since_plain = 0
        elif usual_s is not None:
            limit_s = usual_s
            gain_s += self._judge(ended.spent_s, usual_s, num_accepted / ended.num_sequences)
        self._balance_s = min(self._balance_s + gain_s, SAVED_STEPS_MAX * limit_s)
        self._prompts_s = min(self._prompts_s + gain_s, SAVED_STEPS_MAX * self._prompt_s)
        self._has_predicted = draft_s > 0.0

    def _prompt_ended(self, spent_s: float, draft_s: float) -> None:
        self._prompts_s += COST_SHARE * spent_s
        if not draft_s:
            return
        self._prompt_s = PROMPT_FACTOR * draft_s
        if self._num_free:
            self._num_free -= 1
        else:
            self._prompts_s -= self._prompt_s

    def _judge(self, spent_s: float, usual_s: float, steps_saved: float) -> float:
        """Returns the seconds that a step with drafts has saved, and adapts the number of sequences that may draft."""
        gain_s = usual_s * (1.0 + steps_saved) - min(spent_s, OUTLIER * usual_s)
        self._since_plain += 1
        if not self._has_layer:
            self._width = min(2 * self._width, WIDTH_MAX) if gain_s > 0.0 else 1
        return gain_s
