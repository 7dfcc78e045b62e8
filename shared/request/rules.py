"""Stop strings of a request, and the sampling parameters of each of its choices. Pure."""

import hashlib
from collections.abc import Sequence

import msgspec

from shared import limits
from shared.request.checks import refuse
from shared.sampling import SamplingParams


def stop_strings(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """Returns the stop strings of a request, which may give one, a list, or none. Raises ServiceError."""
    found = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(found) > limits.STOP_STRINGS_MAX:
        refuse("stop", f"must hold at most {limits.STOP_STRINGS_MAX} strings")
    if any(not 1 <= len(one) <= limits.STOP_STRING_CHARS_MAX for one in found):
        refuse("stop", f"must hold strings of 1 to {limits.STOP_STRING_CHARS_MAX} characters")
    return found


def choice_params(params: SamplingParams, choice: int, room: int) -> SamplingParams:
    """Returns the parameters of one choice, with its own seed and with `room` as `max_tokens` if that is 0 (not given).

    `room` is the number of tokens that fit behind the prompt. The first choice has the request's seed, so the first
    choice is the same whether the request asks for one choice or for several. The choices of a beam search differ in
    their rank instead. Only the first choice reports the log probabilities of the prompt.
    """
    max_tokens = params.max_tokens or room
    if choice > 0:
        params = msgspec.structs.replace(params, prompt_logprobs=None)
    if params.beam is not None:
        beam = msgspec.structs.replace(params.beam, rank=choice)
        return msgspec.structs.replace(params, beam=beam, max_tokens=max_tokens)
    seed = params.seed if choice == 0 else _derived_seed(params.seed, choice)
    return msgspec.structs.replace(params, seed=seed, max_tokens=max_tokens)


def _derived_seed(seed: int, choice: int) -> int:
    digest = hashlib.sha256(f"{seed}/{choice}".encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)
