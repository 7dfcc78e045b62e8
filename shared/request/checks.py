"""Checks that several kinds of request bodies share. Pure."""

from collections.abc import Iterable, Sequence
from typing import Any, NoReturn, TypeVar, cast

from shared import limits
from shared.errors import ServiceError

T = TypeVar("T")


def refuse(param: str, rule: str) -> NoReturn:
    """Raises ServiceError('invalid_value'). `rule` continues the sentence that begins with the parameter's name."""
    raise ServiceError("invalid_value", f"'{param}' {rule}.", param=param)


def missing(param: str) -> NoReturn:
    """Raises ServiceError('missing_required_parameter')."""
    raise ServiceError("missing_required_parameter", f"Missing required parameter: '{param}'.", param=param)


def unsupported(param: str, what: str) -> NoReturn:
    """Raises ServiceError('unsupported_parameter'). `what` is the beginning of the sentence '… not supported yet.'."""
    raise ServiceError("unsupported_parameter", f"{what} not supported yet.", param=param)


def check_token_ids(token_ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Raises ServiceError('invalid_value') if the list is empty or an id is outside the vocabulary."""
    if not token_ids:
        refuse(param, "must not be an empty list of token ids")
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        refuse(param, f"has a token id outside the vocabulary of {vocab_size} tokens")


def check_nesting(value: Any, param: str) -> None:
    """Raises ServiceError('invalid_value') if a decoded JSON value is nested deeper than `limits.JSON_DEPTH_MAX`."""
    level: list[Any] = [value]
    for _ in range(limits.JSON_DEPTH_MAX):
        level = [inner for outer in level for inner in _members(outer)]
        if not level:
            return
    refuse(param, f"must not be nested deeper than {limits.JSON_DEPTH_MAX} levels")


def _members(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return cast(dict[str, Any], value).values()
    return cast(list[Any], value) if isinstance(value, list) else ()


def given(value: T | None, default: T) -> T:
    """Returns the value, or the default if the value is None (field missing or null in the request)."""
    return default if value is None else value


def check_token_ids_len(length: int | None, token_ids: Sequence[int] | None) -> None:
    """Raises ServiceError if the length that a request in the engine form gives is not that of its token ids."""
    if length is not None and length != len(token_ids or ()):
        refuse("prompt_token_ids_len", f"must be the number of 'prompt_token_ids', which is {len(token_ids or ())}")


def check_request_id(request_id: str) -> None:
    """Raises ServiceError if the id of a request in the engine form is empty or too long."""
    if not 1 <= len(request_id) <= limits.CLIENT_REQUEST_ID_CHARS_MAX:
        refuse("request_id", f"must have between 1 and {limits.CLIENT_REQUEST_ID_CHARS_MAX} characters")


def preprocess_s(start: float | None, end: float | None) -> float | None:
    """Returns the time between the two ends of the caller's preprocessing, if it gives them. Raises ServiceError."""
    if start is None and end is None:
        return None
    if start is None:
        missing("preprocess_start_time")
    if end is None:
        missing("preprocess_end_time")
    if end < start:
        refuse("preprocess_end_time", "must not be before 'preprocess_start_time'")
    return end - start
