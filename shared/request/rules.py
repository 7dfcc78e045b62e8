"""Checks of a request that `shared.sampling` does not make, and the sampling parameters of its choices. Pure."""

import hashlib
from collections.abc import Sequence

import msgspec

from shared import limits
from shared.context import AS_MANY_AS_FIT
from shared.request.checks import refuse, unsupported
from shared.sampling import SamplingParams


def check_choices(n: int, best_of: int | None, temperature: float, top_k: int, num_prompts: int = 1) -> None:
    """Raises ServiceError if `n` or `best_of` is out of range, or if all choices would be the same."""
    if not 1 <= n <= limits.CHOICES_MAX:
        refuse("n", f"must be between 1 and {limits.CHOICES_MAX}")
    if n * num_prompts > limits.SEQUENCES_PER_REQUEST_MAX:
        refuse("n", f"times the number of prompts must not exceed {limits.SEQUENCES_PER_REQUEST_MAX}")
    if n > 1 and temperature == 0:
        refuse("n", "must be 1 when 'temperature' is 0: every choice would be the same")
    if n > 1 and top_k == 1:
        refuse("n", "must be 1 when 'top_k' is 1: every choice would be the same")
    if best_of is not None and best_of < n:
        refuse("best_of", "must not be less than 'n'")
    if best_of is not None and best_of > n:
        unsupported("best_of", "'best_of' greater than 'n' is")


def stop_strings(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """Returns the stop strings of a request, which may give one, a list, or none. Raises ServiceError."""
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
    """Returns how many last tokens of a prompt are kept, in the terms of `shared.context.truncated`.

    Raises ServiceError for a number out of range. `max_model_len` bounds the result; None if it is not known yet.
    """
    if keep is None:
        return 0
    if keep < 1 and keep != AS_MANY_AS_FIT:
        refuse("truncate_prompt_tokens", "must be at least 1, or -1 for as many as fit into the context")
    return keep if max_model_len is None else min(keep, max_model_len)


def choice_params(params: SamplingParams, choice: int, room: int) -> SamplingParams:
    """Returns the parameters of one choice, with its own seed and with `room` as `max_tokens` if that is 0 (not given).

    `room` is the number of tokens that fit behind the prompt. The first choice has the request's seed, so the first
    choice is the same whether the request asks for one choice or for several.
    """
    seed = params.seed if choice == 0 else _derived_seed(params.seed, choice)
    return msgspec.structs.replace(params, seed=seed, max_tokens=params.max_tokens or room)


def _derived_seed(seed: int, choice: int) -> int:
    digest = hashlib.sha256(f"{seed}/{choice}".encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)
