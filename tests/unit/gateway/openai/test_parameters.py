import contextlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.shared import limits
from antiphon.shared.codec import encode
from antiphon.shared.errors import ServiceError
from antiphon.shared.messages import Submit
from antiphon.shared.parameters.sampling import BeamParams
from tests.unit.gateway.bodies import CARD, HELLO, chat, completion, refusal

BOTH = pytest.mark.parametrize("read", [completion, chat])


@pytest.mark.spec("S-API-013", "S-API-015:sampling", "S-API-016", "S-API-017", "S-API-018")
def test_what_a_request_leaves_out_has_the_defaults_of_the_api():
    request = completion()
    params = request.params
    assert params.max_tokens == 16
    assert params.min_tokens == 0
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (1.0, 1.0, -1, 0.0)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.0, 0.0, 1.0)
    assert (params.stop_token_ids, params.ignore_eos, params.logprobs) == ((), False, None)
    assert (request.n, request.output.stop, request.priority, request.cache_salt) == (1, (), 0, b"")
    assert (request.output.skip_special_tokens, request.inputs.add_special_tokens) == (True, True)
    assert not request.output.include_stop_str_in_output


@pytest.mark.spec("S-API-013")
def test_a_chat_generates_as_many_tokens_as_fit_unless_told_otherwise():
    assert chat().params.max_tokens == 0
    assert chat(max_tokens=9).params.max_tokens == 9
    assert chat(max_tokens=9, max_completion_tokens=7).params.max_tokens == 7


def test_a_chat_template_writes_the_special_tokens_itself():
    assert not chat().inputs.add_special_tokens
    assert chat(add_special_tokens=True).inputs.add_special_tokens
    assert chat().inputs.add_generation_prompt


@BOTH
def test_null_means_the_default_for_every_parameter(read: Any):
    names = [
        *("model", "max_tokens", "max_completion_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty", "seed", "n", "best_of", "stop"),
        *(
            "stop_token_ids",
            "eos_token_ids",
            "include_stop_str_in_output",
            "ignore_eos",
            "skip_special_tokens",
            "echo",
            "stream",
        ),
        *("stream_options", "user", "priority", "cache_salt", "logprobs", "add_special_tokens"),
    ]
    plain, nulls = read(seed=1), read(**dict.fromkeys(names))
    assert nulls.params.seed != plain.params.seed
    assert (nulls.n, nulls.output, nulls.params.temperature) == (plain.n, plain.output, plain.params.temperature)


def test_a_seed_is_passed_on_and_one_is_drawn_where_there_is_none():
    assert completion(seed=7).params.seed == 7
    assert completion().params.seed != completion().params.seed
    refusal(completion, "invalid_value", "seed", seed=2**63)
    refusal(completion, "invalid_value", "seed", seed=10**40)


RANGES = [
    ("temperature", -0.1, 2.1, (0, 2.0, 1)),
    ("top_p", 0, 1.01, (0.01, 1)),
    ("min_p", -0.1, 1.1, (0, 1)),
    ("top_a", -0.1, 1.1, (0, 1)),
    ("presence_penalty", -2.1, 2.1, (-2, 2)),
    ("frequency_penalty", -2.1, 2.1, (-2, 2)),
    ("repetition_penalty", 0, 2.1, (0.5, 1, 2)),
]


@pytest.mark.matrix("S-09")
@pytest.mark.spec("S-API-015:sampling", "S-API-016", "S-API-058", "S-API-081")
@BOTH
@pytest.mark.parametrize(("name", "low", "high", "fine"), RANGES)
def test_numbers_out_of_range_are_refused_by_name(read: Any, name: str, low: float, high: float, fine: Any):
    for value in fine:
        assert getattr(read(**{name: value}).params, name) == value
    refusal(read, "invalid_value", name, **{name: low})
    refusal(read, "invalid_value", name, **{name: high})
    refusal(read, "invalid_value", name, **{name: True})
    refusal(read, "invalid_value", name, **{name: "1"})
    refusal(read, "invalid_value", name, **{name: [1]})


@pytest.mark.spec("S-API-017")
def test_top_k_is_at_least_one_or_off():
    for off in (-1, 0):
        assert completion(top_k=off).params.top_k == off
        assert completion(top_k=off, n=2).n == 2
    assert completion(top_k=5).params.top_k == 5
    assert completion(top_k=10**30).params.top_k == CARD.vocab_size
    for value in (-2, -(10**30)):
        refusal(completion, "invalid_value", "top_k", top_k=value)
    refusal(completion, "invalid_value", "top_k", top_k=1.0)


@pytest.mark.spec("S-API-013", "S-API-059")
@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_max_tokens_is_at_least_one_and_within_the_context(name: str):
    assert completion(**{name: 512}).params.max_tokens == 512
    refusal(completion, "invalid_value", name, **{name: 0})
    refusal(completion, "context_length_exceeded", name, **{name: 513})
    refusal(completion, "context_length_exceeded", name, **{name: 10**30})


def test_min_tokens_must_not_exceed_max_tokens():
    assert completion(min_tokens=4, max_tokens=4).params.min_tokens == 4
    assert chat(min_tokens=400).params.min_tokens == 400
    refusal(completion, "invalid_value", "min_tokens", min_tokens=5, max_tokens=4)
    refusal(chat, "invalid_value", "min_tokens", min_tokens=513)
    refusal(completion, "invalid_value", "min_tokens", min_tokens=-1)


@pytest.mark.spec("S-API-018", "S-API-050")
def test_several_choices_need_sampling():
    assert completion(n=3).n == 3
    refusal(completion, "invalid_value", "n", n=2, temperature=0)
    refusal(completion, "invalid_value", "n", n=2, top_k=1)
    refusal(completion, "invalid_value", "n", n=0)
    refusal(completion, "invalid_value", "n", n=limits.CHOICES_MAX + 1)


def test_prompts_times_choices_are_bounded():
    many = ["x"] * limits.PROMPTS_MAX
    fits = limits.SEQUENCES_PER_REQUEST_MAX // limits.PROMPTS_MAX
    assert completion(prompt=many, n=fits).n == fits
    refusal(completion, "invalid_value", "n", prompt=many, n=fits + 1)


@pytest.mark.spec("S-API-057")
def test_best_of_is_the_number_of_samples_of_which_n_are_returned():
    for asked, counts in (({"n": 2, "best_of": 2}, (2, 2)), ({"best_of": 1}, (1, 1)), ({"n": 2, "best_of": 5}, (2, 5))):
        request = completion(**asked)
        assert (request.n, request.num_sequences) == counts
    refusal(completion, "invalid_value", "best_of", n=3, best_of=2)
    refusal(completion, "invalid_value", "best_of", best_of=limits.CHOICES_MAX + 1)
    many = ["x"] * limits.PROMPTS_MAX
    refusal(completion, "invalid_value", "best_of", prompt=many, best_of=5)


def test_best_of_more_than_n_needs_sampling_and_a_whole_answer():
    for read in (completion, chat):
        refusal(read, "invalid_value", "best_of", best_of=2, temperature=0)
        refusal(read, "invalid_value", "best_of", best_of=2, top_k=1)
        refusal(read, "invalid_value", "stream", n=2, best_of=3, stream=True)


BEAM = {"use_beam_search": True, "n": 2, "temperature": 0}


def test_a_beam_search_follows_no_structure():
    tool = {"type": "function", "function": {"name": "f"}}
    refusal(chat, "invalid_value", "tool_choice", **BEAM, tools=[tool], tool_choice="required")
    refusal(chat, "invalid_value", "guided_json", **BEAM, guided_json={"type": "object"})
    assert chat(**BEAM, tools=[tool], tool_choice="auto").params.beam == BeamParams(2)


@pytest.mark.parametrize("read", [completion, chat])
def test_a_beam_search_is_as_wide_as_best_of(read: Any):
    assert read(**BEAM).params.beam == BeamParams(2)
    request = read(**BEAM, best_of=4, length_penalty=0.5, early_stopping="never")
    assert request.params.beam == BeamParams(4, 0, 0.5, "never")
    assert (request.n, request.num_sequences) == (2, 2)
    # Without n, all hypotheses are returned.
    assert read(use_beam_search=True, temperature=0, best_of=3).n == 3
    assert read(use_beam_search=False, early_stopping=False, length_penalty=1).params.beam is None


@pytest.mark.spec("S-API-051")
@pytest.mark.parametrize("read", [completion, chat])
@pytest.mark.parametrize(
    ("param", "changed"),
    [
        ("n", {"n": 1}),
        ("n", {"n": None}),
        ("temperature", {"temperature": 0.5}),
        ("temperature", {"temperature": None}),
        ("top_p", {"top_p": 0.9}),
        ("top_k", {"top_k": 5}),
        ("stream", {"stream": True}),
        ("min_p", {"min_p": 0.1}),
        ("top_a", {"top_a": 0.1}),
        ("presence_penalty", {"presence_penalty": 1}),
        ("frequency_penalty", {"frequency_penalty": 1}),
        ("repetition_penalty", {"repetition_penalty": 1.1}),
        ("best_of", {"best_of": 1}),
        ("length_penalty", {"length_penalty": 11}),
        ("early_stopping", {"early_stopping": "soon"}),
        ("logit_bias", {"logit_bias": {"5": 1}}),
        ("allowed_token_ids", {"allowed_token_ids": [5]}),
        ("bad_words", {"bad_words": ["x"]}),
        ("guided_json", {"guided_json": {}}),
        ("response_format", {"response_format": {"type": "json_object"}}),
    ],
)
def test_what_a_beam_search_cannot_take_is_refused_by_name(read: Any, param: str, changed: dict[str, Any]):
    assert read(**BEAM, top_p=1, top_k=-1, eos_token_ids=[5]).params.beam
    assert read(**BEAM, top_k=0, logit_bias={}, bad_words=[]).params.beam
    refusal(read, "invalid_value", param, **{**BEAM, **changed})


@pytest.mark.parametrize("read", [completion, chat])
def test_options_of_beam_search_need_it(read: Any):
    refusal(read, "invalid_value", "length_penalty", length_penalty=0.8)
    refusal(read, "invalid_value", "early_stopping", early_stopping=True)


@pytest.mark.spec("S-API-011")
def test_a_prompt_is_a_text_or_token_ids_or_a_batch_of_either():
    assert completion(prompt="a").inputs.texts == ("a",)
    assert completion(prompt=["a", "b"]).inputs.texts == ("a", "b")
    assert completion(prompt=[1, 2]).inputs.token_ids == ((1, 2),)
    assert completion(prompt=[[1, 2], [3]]).inputs.token_ids == ((1, 2), (3,))


@pytest.mark.parametrize(
    "prompt",
    [[], [[]], [1, "a"], [[1], "a"], [[1], 2], 5, True, {}, [1.5], [-1], [300], [[300]], [["a"]], ["a"] * 1025],
)
@pytest.mark.spec("S-API-081")
def test_any_other_prompt_is_refused(prompt: Any):
    with pytest.raises(ServiceError, match="prompt") as raised:
        completion(prompt=prompt)
    assert raised.value.code == "invalid_value"
    assert (raised.value.param or "").startswith("prompt")


def test_a_completion_without_a_prompt_is_told_so():
    refusal(completion, "missing_required_parameter", "prompt", prompt=None)
    refusal(chat, "missing_required_parameter", "messages", messages=None)


def test_stop_is_a_string_or_a_few():
    assert completion(stop="\n").output.stop == ("\n",)
    assert completion(stop=["a", "b"]).output.stop == ("a", "b")
    assert completion(stop=[]).output.stop == ()
    refusal(completion, "invalid_value", "stop", stop="")
    refusal(completion, "invalid_value", "stop", stop=["a", ""])
    refusal(completion, "invalid_value", "stop", stop=["a"] * (limits.STOP_STRINGS_MAX + 1))
    refusal(completion, "invalid_value", "stop", stop="x" * (limits.STOP_STRING_CHARS_MAX + 1))
    refusal(completion, "invalid_value", "stop[1]", stop=["a", 1])


def test_stop_token_ids_are_passed_on():
    assert completion(stop_token_ids=[7, 8]).params.stop_token_ids == (7, 8)
    refusal(completion, "invalid_value", "stop_token_ids", stop_token_ids=[-1])
    refusal(completion, "invalid_value", "stop_token_ids", stop_token_ids=[10**20])
    refusal(completion, "invalid_value", "stop_token_ids", stop_token_ids=[1] * (limits.STOP_TOKEN_IDS_MAX + 1))


@BOTH
def test_end_tokens_of_the_request_are_passed_on(read: Any):
    assert read().params.eos_token_ids == ()
    assert read(eos_token_ids=[7, 8]).params.eos_token_ids == (7, 8)
    refusal(read, "invalid_value", "eos_token_ids", eos_token_ids=[-1])
    refusal(read, "invalid_value", "eos_token_ids", eos_token_ids=[2**31])
    refusal(read, "invalid_value", "eos_token_ids", eos_token_ids=[1] * (limits.STOP_TOKEN_IDS_MAX + 1))


@pytest.mark.spec("S-API-026", "S-API-056")
def test_completions_report_up_to_five_candidates():
    assert completion(logprobs=0).params.logprobs == 0
    assert completion(logprobs=5).params.logprobs == 5
    refusal(completion, "invalid_value", "logprobs", logprobs=6)
    refusal(completion, "invalid_value", "logprobs", logprobs=-1)
    refusal(completion, "invalid_value", "logprobs", logprobs=True)


@pytest.mark.spec("S-API-026")
def test_chat_takes_a_boolean_with_top_logprobs_or_a_number():
    assert chat(logprobs=True).params.logprobs == 0
    assert chat(logprobs=True, top_logprobs=20).params.logprobs == 20
    assert chat(logprobs=3).params.logprobs == 3
    assert chat(logprobs=False).params.logprobs is None
    assert chat(logprobs=False, top_logprobs=0).params.logprobs is None
    refusal(chat, "invalid_value", "top_logprobs", top_logprobs=2)
    refusal(chat, "invalid_value", "top_logprobs", logprobs=True, top_logprobs=21)
    refusal(chat, "invalid_value", "logprobs", logprobs=6)


@pytest.mark.spec("S-API-027")
def test_an_echo_with_logprobs_reports_the_prompt_as_well():
    assert completion(echo=True).params.prompt_logprobs is None
    assert completion(echo=True, logprobs=0).params.prompt_logprobs == 0
    both = completion(echo=True, logprobs=2, prompt_logprobs=5).params
    assert (both.logprobs, both.prompt_logprobs) == (2, 5)
    assert chat(echo=True, logprobs=True, top_logprobs=2).params.prompt_logprobs is None
    refusal(completion, "invalid_value", "stream", echo=True, logprobs=1, stream=True)
    refusal(completion, "invalid_value", "echo", echo=True, logprobs=1, **BEAM)


@pytest.mark.parametrize("read", [completion, chat])
def test_prompt_logprobs_are_a_number_of_candidates(read: Any):
    assert [read(prompt_logprobs=value).params.prompt_logprobs for value in (None, False, 0, 20)] == [None, None, 0, 20]
    for value in (-1, 21, True):
        refusal(read, "invalid_value", "prompt_logprobs", prompt_logprobs=value)
    refusal(read, "invalid_value", "prompt_logprobs", prompt_logprobs=1, **BEAM)
    refusal(read, "invalid_value", "stream", prompt_logprobs=0, stream=True)


def test_only_an_echo_may_have_no_output():
    for name in ("max_tokens", "max_completion_tokens"):
        request = completion(echo=True, **{name: 0})
        assert (request.output.only_echoes, request.params.max_tokens) == (True, 1)
        assert completion(echo=True, stream=True, **{name: 0}).output.only_echoes
        refusal(chat, "invalid_value", name, echo=True, **{name: 0})
    refusal(completion, "invalid_value", "max_tokens", echo=True, max_tokens=0, **BEAM)
    assert not completion(echo=True, max_tokens=1).output.only_echoes


@BOTH
def test_an_output_without_text_has_no_stop_strings_and_no_echo(read: Any):
    assert read().output.detokenize
    assert not read(detokenize=False, stop_token_ids=[1]).output.detokenize
    refusal(read, "invalid_value", "stop", detokenize=False, stop="x")
    refusal(read, "invalid_value", "echo", detokenize=False, echo=True)


@BOTH
def test_how_special_tokens_are_shown_is_passed_on(read: Any):
    assert read().output.spaces_between_special_tokens
    assert not read(spaces_between_special_tokens=False, skip_special_tokens=False).output.spaces_between_special_tokens


@BOTH
def test_a_prompt_is_truncated_to_a_number_of_tokens_or_to_what_fits(read: Any):
    assert read().inputs.truncate_prompt_tokens == 0
    assert read(truncate_prompt_tokens=7).inputs.truncate_prompt_tokens == 7
    assert read(truncate_prompt_tokens=-1).inputs.truncate_prompt_tokens == -1
    assert read(truncate_prompt_tokens=10**30).inputs.truncate_prompt_tokens == CARD.max_model_len
    for value in (0, -2, 1.0):
        refusal(read, "invalid_value", "truncate_prompt_tokens", truncate_prompt_tokens=value)


@pytest.mark.spec("S-API-028")
def test_a_suffix_needs_a_whole_prompt_that_is_text():
    assert completion(suffix="}").inputs.suffix == "}"
    assert completion(suffix="").inputs.suffix == completion(suffix=None).inputs.suffix == ""
    refusal(completion, "invalid_value", "suffix", suffix="}", prompt=[1, 2])
    refusal(completion, "invalid_value", "truncate_prompt_tokens", suffix="}", truncate_prompt_tokens=3)


@pytest.mark.spec("S-API-035")
def test_stream_options_need_a_stream():
    completion(stream=True, stream_options={"include_usage": True})
    refusal(completion, "invalid_value", "stream_options", stream_options={"include_usage": True})
    refusal(chat, "invalid_value", "stream_options", stream=False, stream_options={})


@pytest.mark.spec("S-API-036")
def test_the_user_field_and_what_only_the_client_keeps_have_no_effect():
    plain, extra = completion(seed=1), completion(seed=1, user="someone", store=True, metadata={"a": [1]})
    assert plain == extra


def test_priority_and_cache_salt_are_bounded():
    assert completion(priority=-5).priority == -5
    assert completion(cache_salt="tenant").cache_salt == b"tenant"
    refusal(completion, "invalid_value", "priority", priority=2**31)
    refusal(completion, "invalid_value", "cache_salt", cache_salt="")
    refusal(completion, "invalid_value", "cache_salt", cache_salt="x" * 257)


@pytest.mark.spec("S-API-040")
def test_roles_are_system_user_assistant_and_tool_in_any_order():
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": "hi", "name": "ann"},
        {"role": "assistant", "content": "hello"},
        {"role": "system", "content": "be long"},
        {"role": "tool", "content": "5", "tool_call_id": "c"},
        {"role": "user", "content": ""},
    ]
    turns = chat(messages=messages).inputs.messages
    assert [turn.role for turn in turns] == ["system", "user", "assistant", "system", "tool", "user"]
    assert turns[1].name == "ann"
    refusal(chat, "invalid_value", "messages[0].role", messages=[{"role": "User", "content": "x"}])
    refusal(chat, "missing_required_parameter", "messages[0].role", messages=[{"content": "x"}])


@pytest.mark.spec("S-API-012", "S-API-041")
def test_content_is_text_or_token_ids_or_text_parts():
    def content(value: Any) -> Any:
        return chat(messages=[{"role": "user", "content": value}]).inputs.messages[0]

    assert content("hi").content == "hi"
    assert content([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]).content == "a\nb"
    assert content([]).content == ""
    assert content([258, 1]).token_ids == bytes([2, 1, 0, 0, 1, 0, 0, 0])


@pytest.mark.parametrize(
    ("content", "code", "param"),
    [
        (None, "missing_required_parameter", "messages[0].content"),
        (5, "invalid_value", "messages[0].content"),
        ([1, {"type": "text", "text": "a"}], "invalid_value", "messages[0].content"),
        ([{"type": "text", "text": "a"}, 1], "invalid_value", "messages[0].content[1]"),
        ([999], "invalid_value", "messages[0].content"),
        ([[1, 2], [3]], "invalid_value", "messages[0].content[0]"),
        ([{"type": "text"}], "missing_required_parameter", "messages[0].content[0].text"),
        ([{"text": "a"}], "missing_required_parameter", "messages[0].content[0].type"),
        ([{"type": "image_url", "image_url": {"url": "x"}}], "unsupported_parameter", "messages[0].content[0].type"),
    ],
)
@pytest.mark.spec("S-API-041", "S-API-043:disabled")
def test_other_content_is_refused_where_it_stands(content: Any, code: str, param: str):
    with pytest.raises(ServiceError, match=r".") as raised:
        chat(messages=[{"role": "user", "content": content}])
    assert (raised.value.code, raised.value.param) == (code, param)


def test_a_image_that_is_not_taken_is_refused_with_what_to_do():
    images = [{"type": "image_url", "image_url": {"url": "x"}}]
    error = refusal(
        chat,
        "unsupported_parameter",
        "messages[0].content[0].type",
        messages=[{"role": "user", "content": images}],
    )
    assert "--enable-mm" in error.message
    assert "'messages[0].content[0].type'" in error.message


def test_conversations_are_bounded():
    refusal(chat, "invalid_value", "messages", messages=[])
    refusal(chat, "invalid_value", "messages", messages=HELLO * (limits.MESSAGES_MAX + 1))


@pytest.mark.matrix("S-09")
@settings(max_examples=200)
@given(st.dictionaries(st.sampled_from(["n", "top_k", "seed", "min_tokens", "priority", "max_tokens"]), st.integers()))
def test_whatever_integers_come_the_request_fits_into_a_message(fields: dict[str, int]):
    with contextlib.suppress(ServiceError):
        request = completion(**fields)
        encode(
            Submit(
                sequence_id="r",
                attempt=1,
                gateway_id="g",
                gateway_instance_id="b",
                reply_subject="s",
                prompt_token_ids=b"",
                params=request.params,
                priority=request.priority,
            )
        )
