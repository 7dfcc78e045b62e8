"""Log lines: one for each record, whatever is in it."""

import json
import logging
import re
import subprocess
import sys

import pytest

from antiphon.shared.observability.logs import JsonFormatter, LineFormatter, read_line


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


def test_characters_that_only_a_terminal_sees_are_escaped_too():
    assert line("%s", "a\x9b2J\u202eevil\u2028").endswith(r"a\x9b2J\u202eevil\u2028")


def record_of(message: str, *args: object, level: int = logging.INFO) -> logging.LogRecord:
    return logging.LogRecord("shared.x", level, "file.py", 1, message, args, None)


def test_a_json_line_is_one_object_with_the_fields_of_the_record():
    told = JsonFormatter("engine-1").format(record_of("%d of\n%s", 3, "x\x1b"))
    assert "\n" not in told
    assert "\x1b" not in told
    found = json.loads(told)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", found.pop("time"))
    assert found == {"level": "INFO", "member": "engine-1", "logger": "shared.x", "message": "3 of\nx\x1b"}


@pytest.mark.parametrize("formatter", [LineFormatter("e-1"), JsonFormatter("e-1")])
def test_level_and_message_of_a_line_can_be_read(formatter: logging.Formatter):
    assert read_line(formatter.format(record_of("it burns", level=logging.ERROR))) == ("ERROR", "it burns")


@pytest.mark.parametrize("text", ["", "Traceback (most recent call last):", "{", '{"a": 1}', "[1]", "a ERROR b c"])
def test_other_output_is_no_line_of_the_log(text: str):
    assert read_line(text) is None


STALLED = """
import logging, os, sys
from antiphon.shared.observability.logs import configure_logging
configure_logging("info", "m-1", queued=True)
log = logging.getLogger("x")
for number in range(20_000):
    log.info("line %d %s", number, "x" * 80)
print("logged", flush=True)
sys.stdin.readline()
if len(sys.argv) > 1:
    logging.getLogger().handlers[0].flush()
log.info("the last one")
logging.shutdown()
"""


def test_a_reader_that_stalls_stops_nobody_and_gets_the_number_of_dropped_lines():
    with subprocess.Popen(
        [sys.executable, "-c", STALLED, "flush"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "logged\n"
        _, told = process.communicate("\n")
    lines = told.splitlines()
    assert process.returncode == 0
    assert any(re.search(r" WARNING m-1 \d+ lines were dropped here: ", one) for one in lines)
    numbers = [int(one.split()[4]) for one in lines if " line " in one]
    assert numbers == sorted(numbers)
    assert 1000 < len(numbers) < 20_000
    assert lines[-1].endswith("the last one")


def test_the_end_of_a_process_does_not_wait_for_a_reader_for_ever():
    with subprocess.Popen(
        [sys.executable, "-c", STALLED, "flush"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.wait() == 0
