"""The engine's sampling parameters from a request's fields, by name."""

from dataclasses import fields
from types import SimpleNamespace

import pytest

import antiphon
from services.gateway.openai.schemas import ChatBody, CompletionBody
from shared.request.sampling_fields import sampling_params
from shared.sampling import SamplingParams

ENGINE = set(SamplingParams.__struct_fields__) - {"end_token_ids"}
"""The parameters that requests may give."""


@pytest.mark.parametrize("body", [CompletionBody, ChatBody])
def test_no_parameter_of_the_engine_is_missing_in_a_request_body(body: type[CompletionBody | ChatBody]):
    assert set(body.__struct_fields__) >= ENGINE


def test_no_parameter_of_the_engine_is_missing_in_the_offline_parameters():
    assert {field.name for field in fields(antiphon.SamplingParams)} >= ENGINE


def test_what_is_missing_or_none_has_the_default():
    assert sampling_params(SimpleNamespace(top_k=None, unrelated=1)) == SamplingParams()


def test_a_given_value_has_the_type_of_its_parameter():
    params = sampling_params(SimpleNamespace(temperature=1, stop_token_ids=[1, 2], logprobs=3, ignore_eos=True))
    assert params == SamplingParams(stop_token_ids=(1, 2), logprobs=3, ignore_eos=True)
    assert type(params.temperature) is float


def test_a_resolved_value_takes_the_place_of_the_field():
    assert sampling_params(SimpleNamespace(max_tokens=5, seed=None), max_tokens=7, seed=9).max_tokens == 7
    assert sampling_params(SimpleNamespace(seed=4), seed=9).seed == 9
