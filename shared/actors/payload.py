"""What both buses say to a message that is too large for them. Called by `nats` and `memory`."""

from shared.errors import ServiceError


def too_large(size: int, max_payload: int) -> ServiceError:
    """The error for a message of `size` bytes on a bus that takes at most `max_payload`."""
    return ServiceError(
        "request_too_large",
        f"The request is too large for the message bus: {size} bytes, and the NATS server's max_payload is "
        f"{max_payload}. Make the prompt shorter, or raise max_payload in the server's configuration.",
    )
