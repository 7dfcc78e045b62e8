"""Checks a record that a client sends as strictly as the API checks a request: a client can write anything. Pure."""

from collections.abc import Iterable

import msgspec

from antiphon.services.gateway.path.generation import ModelCard
from antiphon.shared import limits
from antiphon.shared.parameters import tagged_text
from antiphon.shared.parameters.grammar import Grammar
from antiphon.shared.parameters.sampling import TOKEN_IDS_MAX, SamplingParams, check, check_beam, check_vocabulary
from antiphon.shared.recorded_request import RecordedContent
from antiphon.shared.request.checks import check_detokenize, check_token_ids, refuse, stop_strings
from antiphon.shared.request.choices import check_num_sequences


def check_record(content: RecordedContent, card: ModelCard) -> None:
    """Raises ServiceError('invalid_value') for a record that no request to `card`'s model can have made."""
    if not 1 <= content.n <= content.num_sequences <= limits.CHOICES_MAX:
        refuse("record.n", f"must be between 1 and {limits.CHOICES_MAX}")
    check_num_sequences(content.n, content.num_sequences, len(content.prompts))
    check_detokenize(content.detokenize, stop_strings(content.stop))
    _check_texts(content.shown_special_tokens, "record.shown_special_tokens")
    for prompt in content.prompts:
        check_token_ids(prompt.token_ids, card.vocab_size, "record.prompts")
        _check_end_ids(prompt.end_token_ids)
    for sequence in content.sequences:
        _check_ids(sequence.token_ids, card, "record.sequences")
    _check_ids(content.begun, card, "record.begun")
    if not 1 <= content.max_model_len < TOKEN_IDS_MAX:
        refuse("record.max_model_len", "must be a number of tokens")
    _check_params(content.params, card)


def _check_params(params: SamplingParams, card: ModelCard) -> None:
    if not params.max_tokens:
        params = msgspec.structs.replace(params, max_tokens=max(1, params.min_tokens))
    check(params)
    if params.beam is not None:
        check_beam(params)
    check_vocabulary(params, card.vocab_size)
    _check_end_ids(params.end_token_ids)
    if params.grammar is not None:
        _check_grammar(params.grammar)


def _check_grammar(grammar: Grammar) -> None:
    if excess := grammar.excess:
        refuse("record.params", f"has a grammar, which {excess}")
    if grammar.kind == "tagged_text":
        try:
            tagged_text.decode(grammar.text)
        except msgspec.DecodeError as error:
            refuse("record.params", f"has a grammar that cannot be read: {error}")


def _check_ids(token_ids: list[int], card: ModelCard, param: str) -> None:
    if token_ids:
        check_token_ids(token_ids, card.vocab_size, param)


def _check_end_ids(token_ids: Iterable[int]) -> None:
    ids = tuple(token_ids)
    if len(ids) > limits.STOP_TOKEN_IDS_MAX or not all(0 <= one < TOKEN_IDS_MAX for one in ids):
        refuse("record.prompts", f"must have at most {limits.STOP_TOKEN_IDS_MAX} token ids in 'end_token_ids'")


def _check_texts(texts: list[str], param: str) -> None:
    if len(texts) > limits.STOP_STRINGS_MAX or any(len(one) > limits.STOP_STRING_CHARS_MAX for one in texts):
        most, longest = limits.STOP_STRINGS_MAX, limits.STOP_STRING_CHARS_MAX
        refuse(param, f"must hold at most {most} texts of at most {longest} characters")
