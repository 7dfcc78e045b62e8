"""The offline API's `SamplingParams`: checked in the constructor and converted to the engine's parameters.

The ranges are those of the server (`shared.sampling.check` and `shared.request.rules`), so that the offline API and the
server accept the same values. Fields that are not supported yet raise an error that names them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shared import sampling
from shared.errors import ServiceError
from shared.request import rules
from shared.request.choices import choices_of

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
        top_k: Number of likeliest tokens from which the token is sampled; -1: all.
        min_p: Smallest probability of a candidate, as a share of the likeliest token's probability, 0 to 1.
        seed: The same seed gives the same output, alone or in a batch. None: derived from the engine's seed.
        use_beam_search: Returns the `n` best outputs that a beam search finds. Needs `n` above 1 and `temperature` 0.
        length_penalty: In a beam search, an output's score is its log probability divided by its number of tokens to
            this power, -10 to 10.
        early_stopping: True: the beam search ends when `best_of` outputs are complete. False: when no better score is
            likely. "never": when no better score is possible.
        stop: Texts that end the output. The output does not contain them.
        stop_token_ids: Tokens that end the output. The text contains them unless they are special tokens.
        include_stop_str_in_output: Whether the text keeps the stop string that ended the output.
        ignore_eos: Whether generation continues after the model's end token.
        max_tokens: Maximum number of tokens of an output; None: as many as fit into the context.
        min_tokens: Minimum number of tokens before anything except `max_tokens` may end the output.
        logprobs: Number of likeliest candidates to report for each token, in addition to the chosen token, 0 to 20;
            None: log probabilities are not reported.
        prompt_logprobs: The same for each token of the prompt, except the first.
        detokenize: Whether outputs have text; if not, they have only token ids.
        skip_special_tokens: Whether special tokens are omitted from the text.
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
    seed: int | None = None
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
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
    guided_json: Any = None

    def __post_init__(self) -> None:
        self._refuse_what_is_not_served()
        try:
            self.choices = choices_of(self, self.temperature, self.top_k)
            sampling.check(self.engine_params(0))
            self.stop_strings = rules.stop_strings(self.stop)
        except ServiceError as error:
            raise ValueError(error.message) from None
        if self.detokenize is False and self.stop_strings:
            raise ValueError("'stop' needs text: leave 'detokenize' at True, or use 'stop_token_ids'.")

    def engine_params(self, seed: int, room: int = 0) -> sampling.SamplingParams:
        """Returns the engine's parameters. `seed` is used if the user gave no seed, `room` if `max_tokens` is None.

        `room` is the number of tokens that fit into the context after the prompt; 0 if it is not known yet.
        """
        return sampling.SamplingParams(
            max_tokens=(room or max(1, self.min_tokens)) if self.max_tokens is None else self.max_tokens,
            min_tokens=self.min_tokens,
            temperature=float(self.temperature),
            top_p=float(self.top_p),
            top_k=self.top_k,
            min_p=float(self.min_p),
            presence_penalty=float(self.presence_penalty),
            frequency_penalty=float(self.frequency_penalty),
            repetition_penalty=float(self.repetition_penalty),
            seed=seed if self.seed is None else self.seed,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=self.ignore_eos,
            logprobs=self.logprobs,
            beam=self.choices.beam,
            prompt_logprobs=self.prompt_logprobs,
        )

    def _refuse_what_is_not_served(self) -> None:
        asked = {
            "bad_words": bool(self.bad_words),
            "spaces_between_special_tokens": not self.spaces_between_special_tokens,
            "logits_processors": bool(self.logits_processors),
            "truncate_prompt_tokens": self.truncate_prompt_tokens is not None,
            "logit_bias": bool(self.logit_bias),
            "guided_json": self.guided_json is not None,
        }
        for name, wanted in asked.items():
            if wanted:
                raise ValueError(f"'{name}' {_NOT_SERVED}.")
