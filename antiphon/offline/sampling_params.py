"""The offline API's `SamplingParams`: checked in the constructor and converted to the engine's parameters.

The ranges are those of the server (`shared/parameters/sampling.py` and `shared/request/checks.py`), so that the
offline API and the server accept the same values. Fields that are not supported yet raise an error that names them.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from antiphon.shared import limits
from antiphon.shared.errors import ServiceError
from antiphon.shared.parameters import sampling
from antiphon.shared.parameters.grammar import Grammar
from antiphon.shared.request import checks
from antiphon.shared.request.choices import choices_of
from antiphon.shared.request.sampling_fields import token_constraints
from antiphon.shared.request.structured import constraint_of

AS_MANY_AS_FIT = 0
_NOT_SERVED = "is not served yet: leave it out"


@dataclass(kw_only=True)
class SamplingParams:
    """How the tokens of one prompt are sampled. The constructor raises ValueError, which names the invalid field.

    Args:
        n: Outputs for each prompt.
        best_of: Outputs computed for each prompt, of which the `n` with the highest log probability are returned; with
            `use_beam_search`, hypotheses that are searched at the same time. None: `n`.
        presence_penalty: Subtracted once from the logit of every token that occurs in the output so far, -2 to 2.
        frequency_penalty: Subtracted from the logit of a token once for each occurrence in the output so far, -2 to 2.
        repetition_penalty: For tokens that occur in the prompt or output: positive logits are divided by this value and
            negative ones multiplied, 0.01 to 2.
        temperature: 0 (always the likeliest token) to 2.
        top_p: Samples from the smallest set of likeliest tokens whose probabilities reach this sum, above 0 up to 1.
        top_k: Number of likeliest tokens from which the token is sampled; 0 or -1: all.
        min_p: Smallest probability of a candidate, as a share of the likeliest token's probability, 0 to 1.
        top_a: Smallest probability of a candidate, as a share of the square of the likeliest token's, 0 to 1.
        seed: The same seed gives the same output, alone or in a batch. None: derived from the engine's seed.
        use_beam_search: Returns the `n` best outputs that a beam search finds. Needs `n` above 1 and `temperature` 0.
        length_penalty: In a beam search, an output's score is its log probability divided by its number of tokens to
            this power, -10 to 10.
        early_stopping: True: the beam search ends when `best_of` outputs are complete. False: when no better score is
            likely. "never": when no better score is possible.
        stop: Texts that end the output. The output does not contain them.
        stop_token_ids: Tokens that end the output. The text contains them unless they are special tokens.
        eos_token_ids: End tokens in place of the model's own; None: the model's own.
        include_stop_str_in_output: Whether the text keeps the stop string that ended the output.
        ignore_eos: Whether generation continues after an end token.
        max_tokens: Maximum number of tokens of an output; None: as many as fit into the context.
        min_tokens: Minimum number of tokens before anything except `max_tokens` may end the output.
        logprobs: Number of likeliest candidates to report for each token, in addition to the chosen token, 0 to 20;
            None: log probabilities are not reported.
        prompt_logprobs: The same for each token of the prompt, except the first.
        detokenize: Whether outputs have text; if not, they have only token ids.
        skip_special_tokens: Whether special tokens are omitted from the text.
        logit_bias: Value to add to the logit of each of these tokens, -100 to 100.
        allowed_token_ids: The only tokens that may be sampled; None: all.
        bad_words: Token ids and texts that the output must not contain.
        guided_json: JSON Schema that the output must follow: a dict, its text, or a pydantic model's class.
        structured_outputs: A dict or object with one of `json`, `regex`, `choice`, `grammar`, `json_object` and
            `structural_tag`, which the output must follow.
        spaces_between_special_tokens: Whether special tokens that follow each other may be separated by a space, if the
            tokenizer does so. Has no effect while special tokens are omitted.
        truncate_prompt_tokens: Number of last tokens that are kept of the prompt; -1: as many as fit before
            `max_tokens`; None: all, and a prompt that does not fit is an error.
    """

    n: int = 1
    best_of: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    top_a: float = 0.0
    seed: int | None = None
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    eos_token_ids: Sequence[int] | None = None
    bad_words: Sequence[int | str] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    logits_processors: Sequence[Callable[..., Any]] | None = None
    truncate_prompt_tokens: int | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    guided_json: Any = None
    structured_outputs: Any = None

    def __post_init__(self) -> None:
        self._refuse_what_is_not_served()
        try:
            self.grammar = grammar_of(self)
            self.choices = choices_of(self, self.temperature, self.top_k)
            sampling.check(self.engine_params(0))
            self.stop_strings = checks.stop_strings(self.stop)
            checks.check_detokenize(self.detokenize, self.stop_strings)
            checks.prompt_truncation(self.truncate_prompt_tokens)
        except ServiceError as error:
            raise ValueError(error.message) from None

    def engine_params(
        self, seed: int, room: int = 0, bad_words: Sequence[tuple[int, ...]] = ()
    ) -> sampling.SamplingParams:
        """Returns the engine's parameters. `seed` is used if the user gave no seed, `room` if `max_tokens` is None.

        `room` is the number of tokens that fit into the context after the prompt; 0 if it is not known yet.
        `bad_words`: the token ids of the texts among the user's `bad_words`.
        """
        constraints = token_constraints(self)
        return sampling.from_fields(
            self,
            logit_bias=constraints.logit_bias,
            allowed_token_ids=constraints.allowed_token_ids,
            bad_words=(*constraints.bad_words, *bad_words),
            grammar=self.grammar,
            beam=self.choices.beam,
            prompt_logprobs=checks.prompt_logprobs(self.prompt_logprobs, limits.LOGPROBS_MAX),
            max_tokens=(room or max(1, self.min_tokens)) if self.max_tokens is None else self.max_tokens,
            seed=seed if self.seed is None else self.seed,
        )

    def _refuse_what_is_not_served(self) -> None:
        asked = {
            "logits_processors": bool(self.logits_processors),
        }
        for name, wanted in asked.items():
            if wanted:
                raise ValueError(f"'{name}' {_NOT_SERVED}.")


def grammar_of(fields: object) -> Grammar | None:
    """Returns the grammar that the fields for structured output ask for. Raises ServiceError.

    Called by `__post_init__` of a dataclass: it warns, in the line that makes the object, of what has no effect.
    """
    structure = constraint_of(fields)
    if structure is None:
        return None
    for name in structure.ignored:
        warnings.warn(f"'{structure.param}.{name}' has no effect on the output", stacklevel=4)
    return structure.grammar
