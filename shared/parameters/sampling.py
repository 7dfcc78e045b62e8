"""Sampling parameters of a sequence, used by the gateway, the engine and the offline API.

Request bodies and the offline `SamplingParams` have a field for each of them, with the same name. CONTRIBUTING.md says
where a new parameter is added.

`n` and stop strings are not among them: the gateway handles choices and the detokenizer stop strings.
`check` validates all ranges; no other code validates these fields.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import msgspec

from antiphon.shared import limits
from antiphon.shared.errors import ServiceError
from antiphon.shared.parameters.grammar import Grammar
from antiphon.shared.parameters.thinking import ThinkingBudget

TOKEN_IDS_MAX = 2**31
"""Token ids are less than this in every vocabulary, so that they fit into 32-bit integers with a sign."""
BIAS_MAX = 100.0
"""Largest absolute value in `logit_bias`, as in OpenAI's API."""
REPETITION_PENALTY_MIN = 0.01
"""Logits are divided by the penalty. With a smaller one they could exceed the range of float32."""
LENGTH_PENALTY_MAX = 10.0
"""Scores of a beam search are divided by the length to this power. With a larger one they could exceed the range of
floats."""


class BeamParams(msgspec.Struct, frozen=True, array_like=True):
    """Parameters of a beam search. The sequences of one prompt differ only in `rank`."""

    width: int
    """Number of hypotheses that run at the same time, and of the best finished ones that are kept."""
    rank: int = 0
    """Which finished hypothesis this sequence returns: 0 is the one with the highest score."""
    length_penalty: float = 1.0
    """A score is the log probability divided by the number of tokens to this power."""
    early_stopping: bool | Literal["never"] = False
    """True: the search ends when `width` hypotheses are finished. False: when no better score is likely. "never": when
    no better score is possible."""


class SamplingParams(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Parameters of one sequence. The defaults are those of the OpenAI API; parameters that it lacks are off."""

    max_tokens: int = 16
    min_tokens: int = 0
    """Number of output tokens before stop conditions apply."""
    temperature: float = 1.0
    """0 means greedy decoding."""
    top_p: float = 1.0
    top_k: int = -1
    """0 and -1 mean all tokens."""
    min_p: float = 0.0
    """Minimum probability of a candidate, as a fraction of the most likely token's probability."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    """Always set: the gateway draws a seed for requests without one."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    """Number of candidates to report with each token; None means no log probabilities."""
    eos_token_ids: tuple[int, ...] = ()
    """End tokens of this request, in place of all others. Empty means the model's own and `end_token_ids`."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, value added to its logit before the penalties)"""
    allowed_token_ids: tuple[int, ...] | None = None
    """The only tokens that may be sampled; None means all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences of token ids that the output must not contain."""
    grammar: Grammar | None = None
    """The grammar that the output must follow. A complete output ends the sequence, also with `ignore_eos` and
    `min_tokens`, unless the grammar is free text with tags.
    """
    end_token_ids: tuple[int, ...] = ()
    """Further end tokens besides the model's own, those of the conversation template. Set by the tokenizer, not by
    requests.
    """
    beam: BeamParams | None = None
    """Beam search instead of sampling. Needs `temperature` 0 and no other parameter that changes probabilities."""
    prompt_logprobs: int | None = None
    """Number of candidates to report for each token of the prompt; None means no log probabilities of the prompt."""
    thinking: ThinkingBudget | None = None
    """The limit on the tokens of the model's reasoning; None means no limit."""
    top_a: float = 0.0
    """Minimum probability of a candidate, as a fraction of the square of the most likely token's probability."""

    def effective_end_ids(self, of_model: frozenset[int]) -> frozenset[int]:
        """Returns the end tokens that apply to a sequence. `of_model`: the model's own ones."""
        if self.ignore_eos:
            return frozenset()
        return frozenset(self.eos_token_ids) or of_model.union(self.end_token_ids)

    def within(self, room: int) -> "SamplingParams":
        """Returns the parameters with at most `room` as `max_tokens`, 0 of which means that it is not given.

        `room`: number of tokens that fit after the prompt.
        """
        room = max(room, 1)  # A prompt that is pooled may fill the context.
        return msgspec.structs.replace(self, max_tokens=min(self.max_tokens or room, room))


_DEFAULTS: dict[str, Any] = {field.name: field.default for field in msgspec.structs.fields(SamplingParams)}


def from_fields(fields: object, **resolved: Any) -> SamplingParams:
    """Returns the sampling parameters of a request, unchecked.

    Each parameter is the attribute of `fields` with its name; None, or no such attribute, means the default. `resolved`
    has the values of parameters that depend on more than the field, such as `max_tokens` and `seed`.
    """
    for name, default in _DEFAULTS.items():
        if name not in resolved and (given := getattr(fields, name, None)) is not None:
            resolved[name] = _value(given, default)
    return SamplingParams(**resolved)


def _value(given: Any, default: Any) -> Any:
    if isinstance(default, float):
        return float(given)  # 1 is a valid temperature
    return tuple(given) if isinstance(default, tuple) else given


def check(params: SamplingParams) -> None:
    """Raises ServiceError('invalid_value') that names the first field that is out of range."""
    _require(params.max_tokens >= 1, "max_tokens", "must be at least 1")
    _require(params.min_tokens >= 0, "min_tokens", "must not be negative")
    _require(params.min_tokens <= params.max_tokens, "min_tokens", "must not be greater than max_tokens")
    _within(params.temperature, 0.0, 2.0, "temperature")
    _within(params.top_p, 0.0, 1.0, "top_p")
    _require(params.top_p > 0.0, "top_p", "must be greater than 0 and at most 1")
    _require(params.top_k >= -1, "top_k", "must be at least 1, or 0 or -1 for all tokens")
    _within(params.min_p, 0.0, 1.0, "min_p")
    _within(params.top_a, 0.0, 1.0, "top_a")
    _within(params.presence_penalty, -2.0, 2.0, "presence_penalty")
    _within(params.frequency_penalty, -2.0, 2.0, "frequency_penalty")
    _within(params.repetition_penalty, REPETITION_PENALTY_MIN, 2.0, "repetition_penalty")
    _require(-(2**63) <= params.seed < 2**63, "seed", "must be a 64-bit integer")
    if params.stop_token_ids:
        _check_token_ids(params.stop_token_ids, "stop_token_ids")
    if params.eos_token_ids:
        _check_token_ids(params.eos_token_ids, "eos_token_ids")
    for name, count in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        in_range = count is None or 0 <= count <= limits.LOGPROBS_MAX
        _require(in_range, name, f"must be between 0 and {limits.LOGPROBS_MAX}")
    if params.logit_bias or params.allowed_token_ids is not None or params.bad_words or params.thinking is not None:
        _check_tokens(params)
    if params.beam is not None:
        check_beam(params)


def _check_tokens(params: SamplingParams) -> None:
    """Checks the parameters that name tokens, except whether the ids are in the vocabulary (see `check_vocabulary`)."""
    _require(
        len(params.logit_bias) <= limits.LOGIT_BIAS_MAX, "logit_bias", f"has more than {limits.LOGIT_BIAS_MAX} keys"
    )
    for _, value in params.logit_bias:
        _within(value, -BIAS_MAX, BIAS_MAX, "logit_bias")
    allowed, words = params.allowed_token_ids, params.bad_words
    most = limits.ALLOWED_TOKEN_IDS_MAX
    _require(allowed is None or 1 <= len(allowed) <= most, "allowed_token_ids", f"must hold between 1 and {most} ids")
    _require(len(words) <= limits.BAD_WORDS_MAX, "bad_words", f"must hold at most {limits.BAD_WORDS_MAX} words")
    longest = limits.BAD_WORD_TOKENS_MAX
    _require(all(1 <= len(word) <= longest for word in words), "bad_words", f"must hold words of 1 to {longest} tokens")
    if params.thinking is not None:
        most, marks = limits.THINKING_MARK_TOKENS_MAX, (params.thinking.opening, params.thinking.closing)
        _require(0 <= params.thinking.budget < TOKEN_IDS_MAX, "thinking_token_budget", "must be a number of tokens")
        _require(
            all(1 <= len(mark) <= most for mark in marks),
            "thinking_token_budget",
            f"needs marks of reasoning with 1 to {most} tokens",
        )


def check_vocabulary(params: SamplingParams, vocab_size: int) -> None:
    """Raises ServiceError('invalid_value') if a parameter names a token that the model does not have."""
    marks = () if params.thinking is None else (params.thinking.opening, params.thinking.closing)
    named: dict[str, Iterable[int]] = {
        "logit_bias": (token_id for token_id, _ in params.logit_bias),
        "allowed_token_ids": params.allowed_token_ids or (),
        "bad_words": (token_id for word in params.bad_words for token_id in word),
        "thinking_token_budget": (token_id for mark in marks for token_id in mark),
    }
    for param, token_ids in named.items():
        for token_id in token_ids:
            inside = 0 <= token_id < vocab_size
            _require(inside, param, f"names the token {token_id}, outside the vocabulary of {vocab_size} tokens")


def _check_token_ids(token_ids: Sequence[int], param: str) -> None:
    _require(len(token_ids) <= limits.STOP_TOKEN_IDS_MAX, param, f"must hold at most {limits.STOP_TOKEN_IDS_MAX} ids")
    _require(all(0 <= one < TOKEN_IDS_MAX for one in token_ids), param, "must hold token ids")


_BESIDE_BEAMS = {
    "max_tokens", "min_tokens", "seed", "stop_token_ids", "ignore_eos", "logprobs", "eos_token_ids", "end_token_ids",
    "beam",
}  # fmt: skip
"""Parameters that a beam search accepts. It uses the model's own probabilities, so it accepts no others."""


def check_beam(params: SamplingParams) -> None:
    """Raises ServiceError('invalid_value') for parameters that are out of range or not accepted in a beam search.

    `params.beam` must be set. `check` calls this function; it is public for parameters whose `max_tokens` is not known
    yet.
    """
    beam = params.beam
    assert beam is not None
    all_tokens = params.top_k if params.top_k == 0 else -1  # both mean all tokens
    needed = {**_DEFAULTS, "temperature": 0.0, "top_k": all_tokens}
    for name, value in needed.items():
        if name not in _BESIDE_BEAMS:
            _require(getattr(params, name) == value, name, f"must be {_shown(value)} with 'use_beam_search'")
    _require(2 <= beam.width <= limits.CHOICES_MAX, "best_of", f"must be between 2 and {limits.CHOICES_MAX}")
    _require(0 <= beam.rank < beam.width, "n", "must not be greater than 'best_of'")
    _within(beam.length_penalty, -LENGTH_PENALTY_MAX, LENGTH_PENALTY_MAX, "length_penalty")
    _require(beam.early_stopping in (True, False, "never"), "early_stopping", 'must be true, false or "never"')


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else "left out" if value in (None, ()) else str(value)


def _within(value: float, low: float, high: float, param: str) -> None:
    # The bounds are finite, so infinities and NaN are outside too.
    if not low <= value <= high:
        _require(False, param, f"must be between {low:g} and {high:g}")


def _require(ok: bool, param: str, rule: str) -> None:
    if not ok:
        raise ServiceError("invalid_value", f"'{param}' {rule}.", param=param)
