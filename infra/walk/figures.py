"""Counts files, functions and hand-overs in what the processes of a server have recorded. Starts and reads nothing.

What counts as part of a request's walk:

- Only functions of the product, by their file and qualified name; also lambdas, and comprehensions as Python runs them.
  A function that also runs in an idle server is left out, so that the figures are lower bounds.
- Only functions that at least half of the recorded requests ran: what few of them ran is the work of timers.
- A function is visited when it is called, by its caller, by the event loop or by a new thread. A coroutine or generator
  that is resumed counts as visited if it was not visited before; in any case the walk goes on from its file.
- Hand-over: a function is visited in another file than the one before. Return: a hand-over to a file that was visited
  before. All calls count, so that the numbers depend on how many tokens arrive at once; the median request is reported.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from statistics import median_low
from typing import NamedTuple

from infra.walk.hook import RESUMED, SENT

SHARE_MIN = 0.5
GATEWAY = "gateway"
UNTIL_SUBMIT = "gateway, until SubmitBatch leaves"
WHOLE = "whole system"

Function = tuple[str, str]
"""A file's path in the repository, and the qualified name of a function in it."""


class Step(NamedTuple):
    """One entry of a recording; `kind` is one of the kinds in `infra.walk.hook`."""

    kind: int
    function: Function


Recording = dict[str, list[Step]]
"""What each process ran, by the process's name, in the order of time."""


@dataclass(frozen=True, slots=True)
class Walk:
    """The way of a request through a process: its functions in the order of their first visits, and the hand-overs."""

    functions: tuple[Function, ...]
    hand_overs: int
    returns: int


@dataclass(frozen=True, slots=True)
class Figures:
    """The numbers of a walk, or of the whole system."""

    files: int
    functions: int
    hand_overs: int
    returns: int


def walks(idle: Recording, requests: Sequence[Recording], share_min: float = SHARE_MIN) -> dict[str, Walk]:
    """Returns the walk of each process, and as `UNTIL_SUBMIT` the part of the gateway's until it sends `SubmitBatch`.

    `idle`: a recording without requests. `share_min`: the share of the requests that must have run a function.
    """
    found: dict[str, Walk] = {}
    for process in sorted({process for recording in requests for process in recording}, key=_order):
        recorded = [recording.get(process, []) for recording in requests]
        others = {step.function for step in idle.get(process, [])}
        found[process] = _common(recorded, others, share_min)
        if process == GATEWAY:
            found[UNTIL_SUBMIT] = _common([until_sent(steps) for steps in recorded], others, share_min)
    return found


def walk(steps: Iterable[Step], counted: Set[Function]) -> Walk:
    """Returns the walk of one recorded request; functions that are not in `counted` are left out."""
    visited: dict[Function, None] = {}
    files: set[str] = set()
    last, hand_overs, returns = "", 0, 0
    for kind, function in steps:
        if kind == SENT or function not in counted:
            continue
        file = function[0]
        if (kind != RESUMED or function not in visited) and last not in ("", file):
            hand_overs += 1
            returns += file in files
        visited[function] = None
        files.add(file)
        last = file
    return Walk(tuple(visited), hand_overs, returns)


def until_sent(steps: Sequence[Step]) -> Sequence[Step]:
    """Returns the steps before the gateway's first `SubmitBatch` has left."""
    return steps[: next((index for index, step in enumerate(steps) if step.kind == SENT), len(steps))]


def figures(found: Mapping[str, Walk]) -> dict[str, Figures]:
    """Returns the numbers of all walks, and those of the whole system as `WHOLE`.

    A file or function that several processes run counts once in the whole system.
    """
    numbers = {name: _figures([one]) for name, one in found.items()}
    return {**numbers, WHOLE: _figures([one for name, one in found.items() if name != UNTIL_SUBMIT])}


def _figures(found: Sequence[Walk]) -> Figures:
    functions = {function for one in found for function in one.functions}
    files = {file for file, _ in functions}
    hand_overs, returns = sum(one.hand_overs for one in found), sum(one.returns for one in found)
    return Figures(len(files), len(functions), hand_overs, returns)


def _common(recorded: Sequence[Sequence[Step]], others: Set[Function], share_min: float) -> Walk:
    runs = Counter(function for steps in recorded for function in {step.function for step in steps})
    counted = {function for function, count in runs.items() if count >= share_min * len(recorded)} - others
    each = [walk(steps, counted) for steps in recorded]
    functions = tuple(dict.fromkeys(function for one in each for function in one.functions))
    return Walk(functions, median_low(one.hand_overs for one in each), median_low(one.returns for one in each))


def _order(process: str) -> tuple[int, str]:
    """The gateway first, the launcher last, the other services in the order of their names."""
    return (process != GATEWAY) + (process == "launcher"), process
