"""The engine's sampling parameters from a request's fields, by name."""

from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import antiphon
from antiphon.services.gateway.apis.openai.schemas import ChatBody, CompletionBody
from antiphon.shared.parameters.sampling import SamplingParams, from_fields
from tests.unit.gateway.bodies import completion

ENGINE = set(SamplingParams.__struct_fields__) - {"grammar", "beam", "thinking", "end_token_ids"}
"""All but the grammar and the beam search, which several fields stand for, the limit of reasoning, of which a field is
only a part, and the template's end tokens, which no field gives."""


@pytest.mark.parametrize("body", [CompletionBody, ChatBody])
def test_no_parameter_of_the_engine_is_missing_in_a_request_body(body: type[CompletionBody | ChatBody]):
    assert set(body.__struct_fields__) >= ENGINE


def test_no_parameter_of_the_engine_is_missing_in_the_offline_parameters():
    assert {field.name for field in fields(antiphon.SamplingParams)} >= ENGINE


def test_what_is_missing_or_none_has_the_default():
    assert from_fields(SimpleNamespace(top_k=None, unrelated=1)) == SamplingParams()


def test_a_given_value_has_the_type_of_its_parameter():
    params = from_fields(SimpleNamespace(temperature=1, stop_token_ids=[1, 2], logprobs=3, ignore_eos=True))
    assert params == SamplingParams(stop_token_ids=(1, 2), logprobs=3, ignore_eos=True)
    assert type(params.temperature) is float


def test_a_resolved_value_takes_the_place_of_the_field():
    assert from_fields(SimpleNamespace(max_tokens=5, seed=None), max_tokens=7, seed=9).max_tokens == 7
    assert from_fields(SimpleNamespace(seed=4), seed=9).seed == 9


IDS = st.lists(st.integers(0, 2**31 - 1), max_size=3)
VALUES = st.fixed_dictionaries(
    {"seed": st.integers(-(2**63), 2**63 - 1), "max_tokens": st.integers(5, 512)},
    optional={
        "min_tokens": st.integers(0, 5),
        "temperature": st.floats(0, 2) | st.integers(0, 2),
        "top_p": st.floats(0, 1, exclude_min=True) | st.just(1),
        "top_k": st.integers(-1, 300),
        "min_p": st.floats(0, 1),
        "top_a": st.floats(0, 1),
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
        "repetition_penalty": st.floats(0.01, 2),
        "stop_token_ids": IDS,
        "eos_token_ids": IDS,
        "ignore_eos": st.booleans(),
        "logprobs": st.none() | st.integers(0, 5),
    },
)


@given(VALUES)
def test_a_request_has_the_same_parameters_served_and_offline(values: dict[str, Any]):
    assert completion(**values).params == antiphon.SamplingParams(**values).engine_params(0)
