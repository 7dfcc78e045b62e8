"""Faults that are logged at most once in an interval."""

import itertools
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.shared import limits
from antiphon.shared.observability.rare_logs import RareLog


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


class Scene:
    """A log whose clock stands until `time` is set."""

    def __init__(self) -> None:
        self.time = 0.0
        self.lines = Lines()
        log = logging.getLogger("rare")
        log.handlers, log.propagate = [self.lines], False
        self.log = RareLog(log, 1.0, lambda: self.time)


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_the_first_fault_of_a_kind_is_logged_at_once_and_the_next_line_tells_of_those_left_out(scene):
    for number in range(5):
        scene.log.warning("a", "bad %s", number)
    assert scene.lines.texts == ["bad 0"]
    scene.time = 1.0
    scene.log.warning("a", "bad %s", 5)
    assert scene.lines.texts[1:] == ["bad 5 (4 more since the last such line)"]
    scene.time = 2.0
    scene.log.warning("a", "bad %s", 6)
    assert scene.lines.texts[2:] == ["bad 6"]


def test_kinds_do_not_hide_each_other(scene):
    for kind in ("a", "b", "a", "b"):
        scene.log.warning(kind, kind)
    assert scene.lines.texts == ["a", "b"]


def test_kinds_are_bounded_and_those_beyond_share_one_line(scene):
    for number in range(10 * limits.LOG_KINDS_MAX):
        scene.log.warning(str(number), "100%% of kind %d", number)
    assert len(scene.lines.texts) == limits.LOG_KINDS_MAX + 1
    scene.time = 1.0
    scene.log.warning("one more", "more")
    assert scene.lines.texts[-1] == f"more ({9 * limits.LOG_KINDS_MAX - 1} more since the last such line)"


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 0.7)), max_size=60))
def test_no_fault_is_lost_and_lines_of_a_kind_are_an_interval_apart(faults):
    scene = Scene()
    at: dict[str, list[float]] = {}
    for kind, wait_s in faults:
        scene.time += wait_s
        before = len(scene.lines.texts)
        scene.log.warning(kind, "%s", kind)
        if len(scene.lines.texts) > before:
            at.setdefault(kind, []).append(scene.time)
    for kind in {kind for kind, _ in faults}:
        scene.time += 1.0
        scene.log.warning(kind, "%s", kind)
        told = [text for text in scene.lines.texts if text.startswith(kind)]
        left_out = sum(int(text.split("(")[1].split()[0]) for text in told if "(" in text)
        assert len(told) + left_out == 1 + sum(other == kind for other, _ in faults)
        assert all(later - earlier >= 1.0 - 1e-9 for earlier, later in itertools.pairwise(at[kind]))
