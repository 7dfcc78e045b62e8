"""Logging of a process: one line for each record, written to standard error, as text or as a JSON object."""

import json
import logging
import re
import time
from functools import partial
from typing import Any, Literal

from antiphon.shared.observability.line_writer import LineWriter

LogFormat = Literal["text", "json"]
_CONTROLS = (*range(32), *range(127, 160))
_DIRECTIONS = (0x2028, 0x2029, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
"""Line separators of Unicode, and characters that reverse what a terminal shows."""
_ESCAPES = {
    **{code: f"\\x{code:02x}" for code in _CONTROLS},
    **{code: f"\\u{code:04x}" for code in _DIRECTIONS},
    **{ord("\n"): "\\n", ord("\t"): "\\t"},
}
_TEXT = re.compile(r"^\S+Z (DEBUG|INFO|WARNING|ERROR|CRITICAL) \S+ (.+)")


class Told:
    """A message (`record.msg`) that is made of facts when it is written, which need not be at once.

    For lines that are frequent: their text is made together with others, on the thread that writes.
    """

    def __str__(self) -> str:
        """Returns the text of the message."""
        raise NotImplementedError

    def fields(self) -> dict[str, Any]:
        """Returns the facts, as further fields of the JSON object."""
        raise NotImplementedError


class LineFormatter(logging.Formatter):
    """Formats a record as `time level service-id message`, in UTC.

    Line breaks and control characters are escaped, also those of tracebacks, so that a record is always one line.
    """

    def __init__(self, member_id: str) -> None:
        super().__init__()
        self._member_id = member_id

    def format(self, record: logging.LogRecord) -> str:
        """Returns the record as one line. See logging.Formatter."""
        text = super().format(record).translate(_ESCAPES)
        return f"{_stamp(record)} {record.levelname} {self._member_id} {text}"


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object: time, level, member, logger, message, and the fields of the record."""

    def __init__(self, member_id: str) -> None:
        super().__init__()
        self._member_id = member_id

    def format(self, record: logging.LogRecord) -> str:
        """Returns the record as one line. See logging.Formatter."""
        message, fields = super().format(record), record.msg.fields() if isinstance(record.msg, Told) else {}
        return json_line(_stamp(record), record.levelname, self._member_id, record.name, message, **fields)


class _QueueHandler(logging.Handler):
    """Passes formatted records to a `LineWriter`."""

    def __init__(self) -> None:
        super().__init__()
        self._writer = LineWriter(self._form)

    def _form(self, text: str) -> str:
        told = {"name": __name__, "levelno": logging.WARNING, "levelname": "WARNING", "msg": text}
        return self.format(logging.makeLogRecord(told))

    def emit(self, record: logging.LogRecord) -> None:
        """See logging.Handler."""
        try:
            if isinstance(record.msg, Told):
                self._writer.write(partial(self.format, record), urgent=False)
            else:
                self._writer.write(self.format(record))
        except Exception:  # as logging's own handlers do
            self.handleError(record)

    def flush(self) -> None:
        """See logging.Handler. Called at the end of the process."""
        self._writer.flush()


def configure_logging(level: str, member_id: str, log_format: str = "text", *, queued: bool = False) -> None:
    """Writes every record of this process with at least severity `level` to standard error.

    `log_format`: a `LogFormat`. `queued`: from a thread, so that a reader that stalls does not stop the caller; the
    process must end with `logging.shutdown`.
    """
    handler = _QueueHandler() if queued else logging.StreamHandler()
    handler.setFormatter((JsonFormatter if log_format == "json" else LineFormatter)(member_id))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # No format shows them, and they are half of what a record costs.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging.getLogger("nats").setLevel(
        logging.ERROR
    )  # `antiphon.shared.bus.nats` logs the same failures with their reasons


def json_line(stamp: str, level: str, member: str, logger: str, message: str, **fields: Any) -> str:
    """Returns a line of the JSON format. `stamp`: as `stamp_of` returns it."""
    known = {"time": stamp, "level": level, "member": member, "logger": logger, "message": message}
    return json.dumps({**known, **fields})


def read_line(line: str) -> tuple[str, str] | None:
    """Returns level and message of a line in one of the formats; None for other output of a process."""
    if line.startswith("{"):
        try:
            found = json.loads(line)
            return str(found["level"]), str(found["message"])
        except (ValueError, LookupError, TypeError):
            return None
    found = _TEXT.match(line)
    return (found[1], found[2]) if found is not None else None


def stamp_of(unix_s: float) -> str:
    """Returns a time as lines have it: in UTC, with milliseconds."""
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(unix_s))
    return f"{whole}.{int(unix_s * 1000) % 1000:03d}Z"


def _stamp(record: logging.LogRecord) -> str:
    return stamp_of(record.created)
