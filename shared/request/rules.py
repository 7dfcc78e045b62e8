"""Stop strings of a request, and the sampling parameters of each of its choices. Pure."""

import hashlib
from collections.abc import Sequence

import msgspec

from shared import limits
from shared.parameters.context import AS_MANY_AS_FIT
from shared.parameters.sampling import SamplingParams
from shared.request.checks import refuse


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
    """Returns how many last tokens of a prompt are kept, as `keep` of `shared.parameters.context.truncated`.

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


def choice_params(params: SamplingParams, choice: int, room: int) -> SamplingParams:
    """Returns the parameters of one choice, with its own seed and with at most `room` as `max_tokens` (0: not given).

    `room` is the number of tokens that fit after the prompt. The first choice has the request's seed, so the first
    choice is the same whether the request asks for one choice or for several. The choices of a beam search differ
    in `beam.rank` (0: the best hypothesis) and not in the seed. Only the first choice reports the log probabilities of
    the prompt.
    """
    room = max(room, 1)  # A prompt that is pooled may fill the context.
    max_tokens = min(params.max_tokens or room, room)
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
