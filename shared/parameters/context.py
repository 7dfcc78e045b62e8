"""Checks that prompt and output together fit into the model's context length; truncates prompts on request.

`fitted` is called by the tokenizer for prompts given as text, by the gateway for prompts given as token ids, and by the
offline API for both. Texts that are far too long are refused by their size, before anything is encoded: see
`antiphon.shared.limits.TEXT_BYTES_PER_TOKEN`.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

from antiphon.shared import limits
from antiphon.shared.errors import ServiceError

S = TypeVar("S", bound=Sequence[int])
AS_MANY_AS_FIT = -1
"""Value of `truncate_prompt_tokens`: as many tokens as the context has room for before the output."""


def truncated(token_ids: S, keep: int, max_tokens: int, max_model_len: int) -> S:
    """Returns the last `keep` tokens of a prompt.

    `keep` 0 means all tokens; AS_MANY_AS_FIT means as many as leave room for `max_tokens`. `max_tokens` and
    `max_model_len` are as in `check_context`.
    """
    if keep == AS_MANY_AS_FIT and max_model_len > 0:
        keep = max(1, max_model_len - max(1, max_tokens))
    return token_ids[-keep:] if keep > 0 else token_ids  # pyright: ignore[reportReturnType] - a slice has the same type


def fitted(
    token_ids: S,
    keep: int,
    max_tokens: int,
    max_model_len: int,
    param: str,
    *,
    generates: bool = True,
    place: Callable[[S], tuple[S, tuple[int, ...]]] | None = None,
) -> tuple[S, tuple[int, ...]]:
    """Returns a prompt's tokens as they are computed, and the index of the first token of each of its images.

    `keep`: see `truncated`; for a prompt that generates nothing, the number of first tokens to keep (0: all). `place`
    puts images in their places, after the prompt was cut. Raises ServiceError, see `check_context`.
    """
    if generates:
        token_ids = truncated(token_ids, keep, max_tokens, max_model_len)
    elif keep:
        token_ids = token_ids[:keep]  # pyright: ignore[reportAssignmentType] - a slice has the same type
    token_ids, starts = (token_ids, ()) if place is None else place(token_ids)
    check_context(len(token_ids), max_tokens, max_model_len, param, generates=generates)
    return token_ids, starts


def check_context(num_tokens: int, max_tokens: int, max_model_len: int, param: str, *, generates: bool = True) -> None:
    """Raises ServiceError('context_length_exceeded') if a prompt of `num_tokens` leaves no room for `max_tokens`.

    `max_tokens` 0 means as many tokens as fit, but there must be room for at least one. If the request does not
    generate output (`generates`), only the prompt must fit. `max_model_len` 0 means no check. `param` is the name of
    the request's field that holds the prompt.
    """
    wanted = max(1, max_tokens) if generates else 0
    if max_model_len <= 0 or num_tokens + wanted <= max_model_len:
        return
    advice = f"Please reduce the length of the {param}."
    if not generates:
        problem = f"your {param} resulted in {num_tokens} tokens"
    elif max_tokens > 0:
        problem = (
            f"you requested {num_tokens + wanted} tokens ({num_tokens} in the {param}, {wanted} in the completion)"
        )
        advice = f"Please reduce the length of the {param} or completion."
    else:
        problem = f"your {param} resulted in {num_tokens} tokens, which leaves no room for a completion"
    message = f"This model's maximum context length is {max_model_len} tokens. However, {problem}. {advice}"
    raise ServiceError("context_length_exceeded", message, param=param)


def text_bytes_max(max_model_len: int, *, may_exceed: bool = False) -> int:
    """Returns the largest size of a text that is encoded for a context of `max_model_len` tokens, in bytes of UTF-8.

    `may_exceed`: whether the text may have more tokens than the context, because they are only counted, or cut off.
    """
    most = max(limits.TEXT_BYTES_ANY, limits.TEXT_BYTES_PER_TOKEN * max_model_len)
    return max(most, limits.TEXT_BYTES_COUNTED) if may_exceed else most


def check_text_size(size: int, bytes_max: int, max_model_len: int, param: str) -> None:
    """Raises ServiceError for a text of `size` bytes, if that is more than `bytes_max`.

    The code is that of `check_context`, or `request_too_large` for a text that need not fit into the context, for which
    `max_model_len` is 0. `param` is the name of the request's field that holds the text.
    """
    if size <= bytes_max:
        return
    if not max_model_len:
        message = f"The text of '{param}' has {size} bytes in UTF-8. At most {bytes_max} are converted to tokens."
        raise ServiceError("request_too_large", message, param=param)
    raise ServiceError(
        "context_length_exceeded",
        f"This model's maximum context length is {max_model_len} tokens, for which a text may have {bytes_max} bytes "
        f"in UTF-8. However, your {param} has {size} bytes. Please reduce the length of the {param}.",
        param=param,
    )


def num_bytes(text: str) -> int:
    """Returns the size of a text in bytes of UTF-8."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
