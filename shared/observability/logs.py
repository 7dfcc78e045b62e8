"""Logging of a process: one line for each record, written to standard error."""

import logging
import time

_ESCAPES = {code: f"\\x{code:02x}" for code in (*range(32), 127)} | {ord("\n"): "\\n", ord("\t"): "\\t"}


class LineFormatter(logging.Formatter):
    """Formats a record as `time level service-id message`, in UTC.

    Line breaks and control characters are escaped, also those of tracebacks, so that a record is always one line.
    """

    def __init__(self, member_id: str) -> None:
        super().__init__()
        self._member_id = member_id

    def format(self, record: logging.LogRecord) -> str:
        """Returns the record as one line. See logging.Formatter."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        text = super().format(record).translate(_ESCAPES)
        return f"{stamp}.{int(record.msecs):03d}Z {record.levelname} {self._member_id} {text}"


def configure_logging(level: str, member_id: str) -> None:
    """Writes every record of this process with at least severity `level` to standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(LineFormatter(member_id))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("nats").setLevel(
        logging.ERROR
    )  # `antiphon.shared.bus.nats` logs the same failures with their reasons
