"""The public `SamplingParams`: defaults, ranges, and what is refused by name."""

from typing import Any

import pytest

from antiphon import SamplingParams
from antiphon.offline.prompts.guided import GuidedDecodingRequest


def test_the_defaults_are_those_of_the_api() -> None:
    params = SamplingParams()
    assert (params.n, params.max_tokens, params.min_tokens, params.temperature) == (1, 16, 0, 1.0)
    assert (params.top_p, params.top_k, params.min_p, params.seed, params.stop) == (1.0, -1, 0.0, None, None)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.0, 0.0, 1.0)
    assert params.eos_token_ids is None
    assert (params.stop_token_ids, params.logprobs, params.ignore_eos, params.skip_special_tokens) == (
        None,
        None,
        False,
        True,
    )


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        pytest.param("presence_penalty", [-2, 0, 2], [-2.1, 2.1, float("nan")], marks=pytest.mark.spec("S-OFF-040b")),
        pytest.param("frequency_penalty", [-2, 0, 2], [-2.1, 2.1, float("inf")], marks=pytest.mark.spec("S-OFF-040c")),
        pytest.param("repetition_penalty", [0.01, 1, 2], [0, -1, 2.1], marks=pytest.mark.spec("S-OFF-040d")),
        pytest.param("temperature", [0, 1, 2], [-0.1, 2.1, 3], marks=pytest.mark.spec("S-OFF-040e")),
        pytest.param("top_p", [0.01, 1], [0, 1.1, -1], marks=pytest.mark.spec("S-OFF-040f")),
        pytest.param("seed", [None, 0, -5, 2**63 - 1], [2**63], marks=pytest.mark.spec("S-OFF-040g")),
        pytest.param(
            "stop", [None, "end", ["a", "b"]], ["", ["a", ""], ["x"] * 17, "y" * 257],
            marks=pytest.mark.spec("S-OFF-040h"),
        ),
        pytest.param("logprobs", [None, 0, 5, 20], [-1, 21], marks=pytest.mark.spec("S-OFF-040m")),
        ("top_k", [-1, 0, 1, 50], [-2]),
        ("eos_token_ids", [None, [], [7]], [[-1], [2**31], [1] * 129]),
        ("min_p", [0, 0.5, 1], [-0.1, 1.1]),
        ("top_a", [0, 0.5, 1], [-0.1, 1.1]),
        ("max_tokens", [1, 100, None], [0, -1]),
        ("min_tokens", [0, 16], [-1, 17]),
        ("n", [1, 128], [0, 129]),
        ("best_of", [None, 1, 128], [0, 129]),
        ("prompt_logprobs", [None, False, 0, 20], [-1, 21, True]),
        ("length_penalty", [1.0], [0.5]),
        ("early_stopping", [False], [True, "never"]),
        ("truncate_prompt_tokens", [None, -1, 1, 10**9], [0, -2]),
        ("spaces_between_special_tokens", [True, False], []),
        ("detokenize", [True, False], []),
    ],
)  # fmt: skip
def test_a_value_out_of_range_is_refused_in_the_constructor_and_named(
    field: str, good: list[Any], bad: list[Any]
) -> None:
    for value in good:
        assert getattr(SamplingParams(**{field: value}), field) == value
    for value in bad:
        with pytest.raises(ValueError, match=f"'{field}'"):
            SamplingParams(**{field: value})


@pytest.mark.parametrize(
    "asked",
    [
        {"logits_processors": [print]},
    ],
)
def test_what_is_not_served_is_refused_by_name(asked: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"'{next(iter(asked))}' is not served yet"):
        SamplingParams(**asked)


def test_an_unknown_field_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1.0)  # pyright: ignore[reportCallIssue]


def test_stop_strings_need_text() -> None:
    with pytest.raises(ValueError, match="'stop' needs text"):
        SamplingParams(stop="x", detokenize=False)


def test_several_choices_that_would_be_the_same_are_refused() -> None:
    greedy: list[dict[str, Any]] = [{"temperature": 0}, {"top_k": 1}]
    for same in greedy:
        with pytest.raises(ValueError, match="every choice would be the same"):
            SamplingParams(n=2, **same)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 1),
        ("best_of", 2),
        ("temperature", 1.0),
        ("top_p", 0.9),
        ("top_k", 3),
        ("presence_penalty", 1.0),
        ("length_penalty", 10.1),
        ("early_stopping", "soon"),
    ],
)
def test_what_a_beam_search_cannot_take_is_refused_by_name(field: str, value: Any) -> None:
    fine = {"use_beam_search": True, "n": 3, "best_of": 4, "temperature": 0.0}
    assert SamplingParams(**fine, length_penalty=0.5, early_stopping="never").engine_params(0).beam is not None
    with pytest.raises(ValueError, match=f"'{field}'"):
        SamplingParams(**{**fine, field: value})


@pytest.mark.spec("S-OFF-041")
@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"best_of": 2, "temperature": 0}, "temperature"),
        ({"top_k": -2}, "top_k"),
        ({"use_beam_search": True, "n": 1, "temperature": 0}, "n"),
        ({"use_beam_search": True, "n": 2, "temperature": 0.5}, "temperature"),
        ({"use_beam_search": True, "n": 2, "temperature": 0, "top_p": 0.9}, "top_p"),
        ({"use_beam_search": True, "n": 2, "temperature": 0, "top_k": 5}, "top_k"),
        ({"length_penalty": 0.5}, "length_penalty"),
        ({"logit_bias": {1: 101}}, "logit_bias"),
        ({"logit_bias": {"one": 1}}, "logit_bias"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": {"type": "object"}, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"use_beam_search": True, "n": 2, "temperature": 0, "guided_json": {"type": "object"}}, "guided_json"),
    ],
)
def test_the_constructor_keeps_the_rules_between_parameters(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        SamplingParams(**fields)


@pytest.mark.spec("S-OFF-041")
def test_the_constructor_takes_the_further_fields() -> None:
    params = SamplingParams(n=2, best_of=3, top_k=40, ignore_eos=True, logit_bias={5: -1}, guided_json={"type": "null"})
    engine = params.engine_params(1)
    assert (engine.top_k, engine.ignore_eos, engine.logit_bias) == (40, True, ((5, -1.0),))
    assert engine.grammar is not None
    beams = SamplingParams(n=2, best_of=4, use_beam_search=True, length_penalty=0.5, temperature=0)
    assert beams.engine_params(1).beam is not None


def test_keywords_of_a_schema_that_cannot_be_enforced_are_told_where_it_is_given() -> None:
    schema = {"type": "array", "uniqueItems": True}
    with pytest.warns(UserWarning, match=r"'guided_json.uniqueItems' has no effect") as told:
        params = SamplingParams(guided_json=schema)
    assert told[0].filename == __file__
    assert params.grammar is not None
    with pytest.warns(UserWarning, match="uniqueItems") as told:
        request = GuidedDecodingRequest(guided_json=schema)
    assert (told[0].filename, request.grammar) == (__file__, params.grammar)
