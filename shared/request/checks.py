"""Checks of single fields that several kinds of request bodies share, and the errors that name a field. Pure."""

from collections.abc import Iterable, Sequence
from typing import Any, NoReturn, TypeVar, cast

from antiphon.shared import limits
from antiphon.shared.errors import ServiceError
from antiphon.shared.parameters.context import AS_MANY_AS_FIT

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


def stop_strings(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """Returns the stop strings of a request: a string, a list, or none. Raises ServiceError."""
    found = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(found) > limits.STOP_STRINGS_MAX:
        refuse("stop", f"must hold at most {limits.STOP_STRINGS_MAX} strings")
    if any(not 1 <= len(one) <= limits.STOP_STRING_CHARS_MAX for one in found):
        refuse("stop", f"must hold strings of 1 to {limits.STOP_STRING_CHARS_MAX} characters")
    return found


def check_detokenize(detokenize: bool, stops: Sequence[str]) -> None:
    """Raises ServiceError if an output without text would have to be searched for stop strings."""
    if stops and not detokenize:
        refuse("stop", "needs text: leave 'detokenize' at its default, or use 'stop_token_ids'")


def prompt_truncation(keep: int | None, max_model_len: int | None = None) -> int:
    """Returns how many last tokens of a prompt are kept, as `keep` of `antiphon.shared.parameters.context.truncated`.

    Raises ServiceError for a number out of range. `max_model_len` bounds the result; None if it is not known yet.
    """
    if keep is None:
        return 0
    if keep < 1 and keep != AS_MANY_AS_FIT:
        refuse("truncate_prompt_tokens", "must be at least 1, or -1 for as many as fit into the context")
    return keep if max_model_len is None else min(keep, max_model_len)


def pooling_truncation(keep: int | None, max_model_len: int) -> int:
    """Returns how many first tokens of a text that is pooled are kept; 0: all of them.

    Raises ServiceError for a number out of range.
    """
    keep = prompt_truncation(keep)
    if keep > max_model_len:
        reason = f"must be at most {max_model_len}, the model's context length: select a smaller truncation size, or -1"
        refuse("truncate_prompt_tokens", reason)
    return max_model_len if keep == AS_MANY_AS_FIT else keep


def prompt_logprobs(asked: int | bool | None, most: int) -> int | None:
    """Returns the number of candidates to report for each token of the prompt; None: no log probabilities of it.

    Raises ServiceError for a number that is not between 0 and `most`.
    """
    if asked is None or asked is False:
        return None
    if asked is True or not 0 <= asked <= most:
        refuse("prompt_logprobs", f"must be a number between 0 and {most}")
    return asked
