"""Beam search over reported candidates: which hypotheses continue, which are finished, and when the search is over.

Pure: knows log probabilities and stop conditions, but no sequences, rows or KV blocks (`beam_group` keeps those). The
rules are those of transformers' `generate` with `num_beams` = width, so that both give the same tokens:

- A step extends every running hypothesis by every candidate and orders the results by their total log probability.
- A result that ends (end token, stop token, maximum length) is finished if it is among the best `width` results; the
  best `width` results that do not end continue to run.
- A finished hypothesis has the score `total / length ** length_penalty`, where the length counts the generated tokens,
  the end token included. The best `width` finished hypotheses are kept.
- The search is over at the maximum length, or when `width` hypotheses are finished and, unless `early_stopping` is
  True, no running hypothesis is expected to get a better score than the worst of them.

Equal totals are ordered by running hypothesis, then by the order of the reported candidates.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from antiphon.services.engine.core.plan import SampledLogprobs
from antiphon.services.engine.core.stopping import StopRules, Verdict
from antiphon.shared.parameters.sampling import BeamParams

_TOTAL = attrgetter("total")
_SCORE = attrgetter("score")


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Hypothesis:
    """Generated tokens as a linked list: one token and the hypothesis that it extends. `total`: log probability."""

    parent: "Hypothesis | None" = None
    token_id: int = -1
    logprobs: SampledLogprobs = field(default_factory=lambda: SampledLogprobs(0.0))
    """Log probability of the token, and the candidates of its step."""
    total: float = 0.0
    length: int = 0

    def tokens(self) -> tuple[tuple[int, ...], tuple[SampledLogprobs, ...]]:
        """Returns the generated tokens and their log probabilities, in order."""
        token_ids: list[int] = []
        logprobs: list[SampledLogprobs] = []
        node = self
        while node.parent is not None:
            token_ids.append(node.token_id)
            logprobs.append(node.logprobs)
            node = node.parent
        return tuple(reversed(token_ids)), tuple(reversed(logprobs))


@dataclass(frozen=True, slots=True, eq=False)
class Finished:
    """A finished hypothesis with its score and the reason of its end."""

    hypothesis: Hypothesis
    score: float
    verdict: Verdict


@dataclass(frozen=True, slots=True, eq=False)
class _Extension:
    """A running hypothesis (by index) extended by one candidate."""

    source: int
    hypothesis: Hypothesis
    verdict: Verdict | None

    @property
    def total(self) -> float:
        return self.hypothesis.total


class BeamSearch:
    """One search. It starts with the empty hypothesis; `advance` takes the candidates of each step."""

    def __init__(self, params: BeamParams, rules: StopRules) -> None:
        self.running: list[Hypothesis] = [Hypothesis()]
        """Hypotheses that the next step extends, best first; the empty one before the first step, then `width`."""
        self.finished: list[Finished] = []
        """The best finished hypotheses, best first, at most `width`. Exactly `width` when the search is over."""
        self.over = False
        self._params = params
        self._rules = rules

    def advance(self, reports: Sequence[SampledLogprobs]) -> list[int]:
        """Takes one step. Returns, for each hypothesis that now runs, the index of the one that it extends.

        `reports` has the candidates of each running hypothesis: at least `num_candidates` of its most likely next
        tokens, most likely first. Returns an empty list if the search is over.
        """
        assert len(reports) == len(self.running), f"{len(reports)} reports for {len(self.running)} hypotheses"
        found = [one for index, report in enumerate(reports) for one in self._extensions(index, report)]
        found.sort(key=_TOTAL, reverse=True)
        width = self._params.width
        self._finish(one for one in found[:width] if one.verdict is not None)
        running = [one for one in found if one.verdict is None][:width]
        assert not running or len(running) == width, f"{len(running)} of {width} hypotheses run on"
        self.running = [one.hypothesis for one in running]
        self.over = not running or not self._may_improve(running[0].hypothesis)
        return [] if self.over else [one.source for one in running]

    def _extensions(self, index: int, report: SampledLogprobs) -> list[_Extension]:
        source = self.running[index]
        found: list[_Extension] = []
        for token_id, logprob in zip(report.top_token_ids, report.top_logprobs, strict=True):
            if self._rules.forbids(token_id, source.length):
                continue
            logprobs = SampledLogprobs(logprob, report.top_token_ids, report.top_logprobs)
            extended = Hypothesis(
                parent=source,
                token_id=token_id,
                logprobs=logprobs,
                total=source.total + logprob,
                length=source.length + 1,
            )
            found.append(_Extension(index, extended, self._rules.verdict(token_id, source.length)))
        return found

    def _finish(self, ended: Iterable[_Extension]) -> None:
        for one in ended:
            assert one.verdict is not None
            self.finished.append(Finished(one.hypothesis, self._score(one.total, one.hypothesis.length), one.verdict))
        # The sort is stable: among equal scores, the hypothesis that finished first comes first.
        self.finished.sort(key=_SCORE, reverse=True)
        del self.finished[self._params.width :]

    def _may_improve(self, best: Hypothesis) -> bool:
        """Returns whether the search goes on, given the best running hypothesis.

        The best score that the search can still reach is estimated as the score of this hypothesis if it ended now
        (`early_stopping` False) or at the maximum length (`early_stopping` "never" with a positive length penalty).
        """
        if len(self.finished) < self._params.width:
            return True
        if self._params.early_stopping is True:
            return False
        at_end = self._params.early_stopping == "never" and self._params.length_penalty > 0.0
        length = self._rules.max_tokens if at_end else best.length
        return self._score(best.total, length) > self.finished[-1].score

    def _score(self, total: float, length: int) -> float:
        return total / length**self._params.length_penalty


def num_candidates(params: BeamParams, rules: StopRules) -> int:
    """Returns how many candidates each step must report for a hypothesis.

    These are one for each hypothesis that continues, and one for each token that may end a hypothesis.
    """
    return params.width + len(rules.end_token_ids)
