"""The error for a message that exceeds the size limit of the bus. Used by `nats` and by the tests' in-process bus."""

import logging

from shared.errors import ServiceError

log = logging.getLogger(__name__)
_num_refused = 0


def num_refused() -> int:
    """Returns the number of messages of this process that exceeded the size limit of the bus."""
    return _num_refused


def too_large(size: int, max_payload: int) -> ServiceError:
    """Returns the error for a message of `size` bytes on a bus with a limit of `max_payload` bytes.

    The error is also counted and logged.
    """
    global _num_refused
    _num_refused += 1
    log.warning("a message of %d bytes exceeds the bus limit of %d (%d so far)", size, max_payload, _num_refused)
    return ServiceError(
        "request_too_large",
        f"The request is too large for the message bus: {size} bytes, and the NATS server's max_payload is "
        f"{max_payload}. Make the prompt shorter, or raise max_payload in the server's configuration.",
    )
