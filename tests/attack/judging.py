"""What is seen of an attack, and whether that is good enough. Pure: no process, no clock."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

CALM_TOKENS_PER_S_MIN = 5.0
"""A victim that is slower than this before the attack says nothing about the attack."""


@dataclass(frozen=True, slots=True)
class Window:
    """What the victim saw in some seconds. Gaps are times between two tokens, the wait for the first one included."""

    seconds: float
    tokens: int
    p99_gap_s: float
    longest_gap_s: float
    livez_s: float
    """The longest time that `/livez` took."""
    lost: int = 0
    """Streams that ended with an error or in their midst."""
    refused: int = 0
    """Requests of the victim that were not answered with 200."""

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all its streams."""
        return self.tokens / self.seconds if self.seconds else 0.0


def window_of(
    seconds: float, tokens: int, gaps: Sequence[float], livez: Sequence[float], *, lost: int, refused: int
) -> Window:
    """Returns the window of these measurements. `gaps`: also those that no token has ended yet."""
    ordered = sorted(gaps)
    p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return Window(seconds, tokens, p99, ordered[-1], max(livez), lost, refused)


@dataclass(frozen=True, slots=True)
class Goal:
    """What must hold during an attack. None: not measured."""

    share: float | None = 0.25
    """Least tokens per second of the victim, as a share of those before. An attacker may work as hard as its limits
    allow, on the same cores; a quarter is what four busy clients leave to a fifth."""
    p99_gap_s: float | None = 1.0
    livez_s: float | None = 3.0
    """Below the 5 s after which a liveness probe fails (infra/kubernetes)."""
    rss_mib: float = 1024.0
    """Largest memory of any process: the limit of a gateway in infra/kubernetes."""
    recovery_s: float | None = 10.0
    """Longest time after the attack until the victim has half its tokens per second again."""


FIGURES_ONLY = Goal(None, None, None, recovery_s=None)
"""For attacks whose success is an answer or a file, not a slow server."""


@dataclass(slots=True)
class Told:
    """What an attack itself says: figures, and what it achieved that it must not."""

    figures: dict[str, Any] = field(default_factory=dict[str, Any])
    broken: list[str] = field(default_factory=list[str])


@dataclass(slots=True)
class Seen:
    """Everything that is known after an attack. Without a victim, `calm` and `during` are None."""

    told: Told
    calm: Window | None = None
    during: Window | None = None
    recovery_s: float | None = None
    """None: not within the time that was given."""
    peak_mib: Mapping[str, float] = field(default_factory=dict[str, float])
    """Largest memory of each process of the server, by its name."""
    ended: Sequence[str] = ()
    """Processes of the server that ended, by name."""
    skipped: str = ""
    """Why the attack did not run."""


def misses(goal: Goal, seen: Seen) -> list[str]:
    """Returns in which way the goal was missed; empty if it was reached."""
    if seen.skipped:
        return []
    return [*seen.told.broken, *_of_processes(goal, seen), *_of_victim(goal, seen)]


def _of_processes(goal: Goal, seen: Seen) -> Iterator[str]:
    if seen.ended:
        yield f"{', '.join(seen.ended)} ended"
    for name, mib in seen.peak_mib.items():
        if mib > goal.rss_mib:
            yield f"{name} took {mib:.0f} MiB, more than {goal.rss_mib:.0f}"


def _of_victim(goal: Goal, seen: Seen) -> Iterator[str]:
    calm, during = seen.calm, seen.during
    if calm is None or during is None:
        return
    if calm.tokens_per_s < CALM_TOKENS_PER_S_MIN:
        yield f"the victim had only {calm.tokens_per_s:.1f} tokens/s before the attack: run it on an idle machine"
        return
    share = during.tokens_per_s / calm.tokens_per_s
    if goal.share is not None and share < goal.share:
        yield f"the victim had {share:.0%} of its tokens/s, less than {goal.share:.0%}"
    if goal.p99_gap_s is not None and during.p99_gap_s > goal.p99_gap_s:
        yield f"99% of the victim's gaps are only below {during.p99_gap_s:.2f} s, not {goal.p99_gap_s:.2f} s"
    if goal.livez_s is not None and during.livez_s > goal.livez_s:
        yield f"/livez took {during.livez_s:.1f} s, longer than {goal.livez_s:.1f} s"
    if during.lost:
        yield f"{during.lost} of the victim's streams were lost"
    if during.refused:
        yield f"{during.refused} of the victim's requests were refused"
    if goal.recovery_s is not None and (seen.recovery_s is None or seen.recovery_s > goal.recovery_s):
        yield f"the victim had not recovered {goal.recovery_s:.0f} s after the attack"


@dataclass(frozen=True, slots=True)
class Result:
    """One line of the report."""

    name: str
    what: str
    attacker: str
    goal: str
    verdict: str
    """`held`, `broken` or `skipped`."""
    misses: tuple[str, ...]
    seconds: float
    figures: Mapping[str, Any]
    skipped: str = ""
    calm_tokens_per_s: float | None = None
    tokens_per_s: float | None = None
    p99_gap_s: float | None = None
    longest_gap_s: float | None = None
    livez_s: float | None = None
    recovery_s: float | None = None
    peak: str = ""
    peak_mib: float | None = None

    def as_json(self) -> dict[str, Any]:
        """Returns the fields that have a value."""
        return {name: value for name, value in asdict(self).items() if value not in (None, "", ())}


def result(name: str, what: str, attacker: str, goal: Goal, text: str, seen: Seen, seconds: float) -> Result:
    """Returns the line of an attack. `text`: the goal in words."""
    wrong = misses(goal, seen)
    verdict = "skipped" if seen.skipped else "broken" if wrong else "held"
    peak = max(seen.peak_mib.items(), key=lambda one: one[1], default=("", None))
    measured = {}
    if seen.calm is not None and seen.during is not None:
        measured = {
            "calm_tokens_per_s": round(seen.calm.tokens_per_s, 1),
            "tokens_per_s": round(seen.during.tokens_per_s, 1),
            "p99_gap_s": round(seen.during.p99_gap_s, 2),
            "longest_gap_s": round(seen.during.longest_gap_s, 2),
            "livez_s": round(seen.during.livez_s, 2),
            "recovery_s": seen.recovery_s,
        }
    return Result(
        name, what, attacker, text, verdict, tuple(wrong), round(seconds, 1), seen.told.figures, seen.skipped,
        peak=peak[0], peak_mib=None if peak[1] is None else round(peak[1]), **measured,
    )  # fmt: skip
