"""Decides whether draft tokens save time, by comparing the times of steps with and without drafts.

Draft tokens cost time whether they are accepted or not; how much depends on model, machine and batch. Steps that only
decode are therefore timed, and a balance is kept in seconds:

    plus     a small share (`COST_SHARE`) of every step's time, and for each accepted draft token the time of one token
    minus    the time of a step with drafts beyond the usual time of a step without

Sequences may draft only while the balance is positive, so drafts cost at most that share of the time, whatever the
text. The number of sequences that may draft in a step starts at one, doubles after every step that saved time and
returns to one after every step that lost time, so that trials are cheap in large batches too. The caller passes the
times; a time of 0 means that there is no clock, and then drafts are not limited. Used only by `scheduler`.
"""

from antiphon.services.engine.core.policy.step_times import StepTimes, TimedStep

COST_SHARE = 0.01
"""Share of the total time that rejected draft tokens may cost."""
SAVED_STEPS_MAX = 4
"""Upper limit of the balance, in usual step times. It limits the loss when drafts begin to be rejected."""
OUTLIER = 3.0
"""A step with drafts is charged at most this many times the usual step time."""
WIDTH_MAX = 2**16
REFRESH_STEPS = 32
"""After this many steps with drafts, one step runs without, to keep the usual time up to date."""


class SpeculationController:
    """The balance of one engine."""

    def __init__(self, times: StepTimes) -> None:
        self._times = times
        self._balance_s = 0.0
        self._width = 1
        self._since_plain = 0

    def num_drafting(self, num_sequences: int, now_s: float) -> int:
        """Returns how many of the running sequences may get draft tokens in the next step."""
        if not now_s:
            return num_sequences
        usual_s = self._times.usual_s(num_sequences)
        if usual_s is None or self._since_plain >= REFRESH_STEPS or self._balance_s <= 0.0:
            return 0
        return self._width

    def step_ended(self, ended: TimedStep | None, num_accepted: int) -> None:
        """Records the end of a step with `num_accepted` accepted draft tokens. `ended`: see `StepTimes.ended`."""
        if ended is None:
            return
        self._balance_s += COST_SHARE * ended.spent_s
        usual_s = self._times.usual_s(ended.num_sequences)
        if not ended.num_draft_tokens:
            self._since_plain = 0
            self._balance_s = min(self._balance_s, SAVED_STEPS_MAX * ended.spent_s)
        elif usual_s is not None:
            self._judge(ended.spent_s, usual_s, num_accepted / ended.num_sequences)

    def _judge(self, spent_s: float, usual_s: float, steps_saved: float) -> None:
        gain_s = usual_s * (1.0 + steps_saved) - min(spent_s, OUTLIER * usual_s)
        self._since_plain += 1
        self._width = min(2 * self._width, WIDTH_MAX) if gain_s > 0.0 else 1
        self._balance_s = min(self._balance_s + gain_s, SAVED_STEPS_MAX * usual_s)
