"""The choices of a request: how many sequences each prompt needs, their parameters, and which are returned. Pure.

Sampling computes `best_of` sequences for each prompt and returns the `n` with the highest log probability. A beam
search runs `best_of` hypotheses at a time. It has `n` sequences for each prompt; the sequence with rank r returns the
hypothesis with the r-th highest score, counted from 0.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from antiphon.shared import limits
from antiphon.shared.parameters.sampling import BeamParams, SamplingParams
from antiphon.shared.request.checks import given, refuse


@dataclass(frozen=True, slots=True)
class Choices:
    """The choices of each prompt: `num_sequences` are computed, `n` of them are returned.

    `beam`: None without beam search.
    """

    n: int = 1
    num_sequences: int = 1
    beam: BeamParams | None = None


def choices_of(fields: Any, temperature: float, top_k: int, num_prompts: int = 1) -> Choices:
    """Returns the choices of a request. Raises ServiceError for a field that is out of range or contradicts others.

    `fields`: an object with `n`, `best_of`, `use_beam_search`, `length_penalty` and `early_stopping`; None: not given.
    `antiphon.shared.parameters.sampling.check` checks the parameters of a beam search that concern one sequence.
    """
    searches = bool(fields.use_beam_search)
    n = given(fields.n, given(fields.best_of, 1) if searches else 1)
    best_of = given(fields.best_of, n)
    if not 1 <= n <= limits.CHOICES_MAX:
        refuse("n", f"must be between 1 and {limits.CHOICES_MAX}")
    if best_of < n:
        refuse("best_of", "must not be less than 'n'")
    if best_of > limits.CHOICES_MAX:
        refuse("best_of", f"must not be greater than {limits.CHOICES_MAX}")
    num_sequences = n if searches else best_of
    check_num_sequences(n, num_sequences, num_prompts)
    if searches:
        return Choices(n, n, _beam(fields, n, best_of))
    _check_sampling(fields, Choices(n, num_sequences), temperature, top_k)
    return Choices(n, num_sequences)


def check_num_sequences(n: int, num_sequences: int, num_prompts: int) -> None:
    """Raises ServiceError if a request has too many sequences in all. `n` and `num_sequences`: see Choices."""
    if num_sequences * num_prompts > limits.SEQUENCES_PER_REQUEST_MAX:
        param = param_of_number(n, num_sequences)
        refuse(param, f"times the number of prompts must not exceed {limits.SEQUENCES_PER_REQUEST_MAX}")


def param_of_number(n: int, num_sequences: int) -> str:
    """Returns the name of the field that determines the number of sequences, for errors."""
    return "best_of" if num_sequences > n else "n"


def best_first(cumulative_logprobs: Sequence[float], n: int) -> list[int]:
    """Returns the indices of the `n` highest log probabilities, highest first; equal ones in their order."""
    order = sorted(range(len(cumulative_logprobs)), key=lambda index: -cumulative_logprobs[index])
    return order[:n]


def choice_params(params: SamplingParams, choice: int) -> SamplingParams:
    """Returns the parameters of one choice, with its own seed; those of the first choice are `params`.

    So the first choice is the same whether the request asks for one choice or for several. The choices of a beam search
    differ in `beam.rank` (0: the best hypothesis) and not in the seed. Only the first choice reports the log
    probabilities of the prompt.
    """
    if choice == 0:
        return params
    if params.beam is not None:
        beam = msgspec.structs.replace(params.beam, rank=choice)
        return msgspec.structs.replace(params, beam=beam, prompt_logprobs=None)
    return msgspec.structs.replace(params, seed=_derived_seed(params.seed, choice), prompt_logprobs=None)


def _beam(fields: Any, n: int, best_of: int) -> BeamParams:
    if n == 1:
        refuse("n", "must be greater than 1 with 'use_beam_search'")
    early_stopping = given(fields.early_stopping, False)
    if early_stopping not in (True, False) and early_stopping != "never":
        refuse("early_stopping", 'must be true, false or "never"')
    stops_early = "never" if early_stopping == "never" else bool(early_stopping)
    return BeamParams(best_of, 0, float(given(fields.length_penalty, 1.0)), stops_early)


def _check_sampling(fields: Any, choices: Choices, temperature: float, top_k: int) -> None:
    if given(fields.length_penalty, 1.0) != 1.0:
        refuse("length_penalty", "needs 'use_beam_search'")
    if given(fields.early_stopping, False) is not False:
        refuse("early_stopping", "needs 'use_beam_search'")
    for name, takes_one in (("temperature", temperature == 0), ("top_k", top_k == 1)):
        if choices.num_sequences > 1 and takes_one:
            value = 0 if name == "temperature" else 1
            refuse(
                param_of_number(choices.n, choices.num_sequences),
                f"must be 1 when '{name}' is {value}: every choice would be the same",
            )


def _derived_seed(seed: int, choice: int) -> int:
    digest = hashlib.sha256(f"{seed}/{choice}".encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)
