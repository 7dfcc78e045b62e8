"""Log lines: one for each record, whatever is in it."""

import logging
import re
import sys

from antiphon.shared.observability.logs import LineFormatter


def line(message: str, *args: object, exc_info=None) -> str:
    record = logging.LogRecord("shared.x", logging.WARNING, "file.py", 1, message, args, exc_info)
    return LineFormatter("engine-h-1").format(record)


def test_a_line_has_time_level_service_id_and_message():
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z WARNING engine-h-1 queue of 3", line("queue of %d", 3))


def test_line_breaks_and_control_characters_are_escaped():
    text = line("id %s", "a\r\nFAKE\x1b[2J\ttab\x00")
    assert text.endswith(r"id a\x0d\nFAKE\x1b[2J\ttab\x00")


def test_a_traceback_stays_on_its_line():
    try:
        raise ValueError("reason")
    except ValueError:
        text = line("failed", exc_info=sys.exc_info())
    assert "\n" not in text
    assert "ValueError: reason" in text
