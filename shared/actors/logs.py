"""Logging of a process: one line for each record, to the standard error stream."""

import logging
import time

_ESCAPES = {code: f"\\x{code:02x}" for code in (*range(32), 127)} | {ord("\n"): "\\n", ord("\t"): "\\t"}


class LineFormatter(logging.Formatter):
    """`time level service-id message`, in UTC; line breaks and control characters are escaped, tracebacks included."""

    def __init__(self, member_id: str) -> None:
        super().__init__()
        self._member_id = member_id

    def format(self, record: logging.LogRecord) -> str:
        """See logging.Formatter."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        text = super().format(record).translate(_ESCAPES)
        return f"{stamp}.{int(record.msecs):03d}Z {record.levelname} {self._member_id} {text}"


def configure_logging(level: str, member_id: str) -> None:
    """Sends every record of this process from `level` on to the standard error stream."""
    handler = logging.StreamHandler()
    handler.setFormatter(LineFormatter(member_id))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("nats").setLevel(logging.ERROR)  # `shared.actors.nats` tells the same, with the reason
