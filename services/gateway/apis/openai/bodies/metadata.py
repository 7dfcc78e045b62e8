"""Checks `metadata`, a client's own key-value pairs, which are stored and returned with an object. Pure."""

from antiphon.shared import limits
from antiphon.shared.request.checks import refuse


def check_metadata(metadata: dict[str, str] | None) -> None:
    """Raises ServiceError if metadata has too many pairs, or a key or a value that is too long."""
    pairs = metadata or {}
    if len(pairs) > limits.METADATA_PAIRS_MAX:
        refuse("metadata", f"must hold at most {limits.METADATA_PAIRS_MAX} pairs")
    for key, value in pairs.items():
        if len(key) > limits.METADATA_KEY_CHARS_MAX or len(value) > limits.METADATA_VALUE_CHARS_MAX:
            rule = f"of at most {limits.METADATA_KEY_CHARS_MAX} and {limits.METADATA_VALUE_CHARS_MAX} characters"
            refuse("metadata", f"must hold keys and values {rule}")
