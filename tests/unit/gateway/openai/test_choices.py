import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.services.gateway.apis.openai.answers.choices import ChoiceAccumulator, merge
from antiphon.services.gateway.apis.openai.answers.logprobs import chat_logprobs, completion_logprobs
from antiphon.services.gateway.path.generation import SequenceUpdate
from antiphon.shared.errors import ServiceError
from tests.unit.gateway.request_contexts import position, update


@pytest.mark.spec("S-API-075a", "S-API-075b", "S-API-075c", "S-API-075d", "S-API-075e")
def test_usage_counts_a_prompt_once_and_all_choices():
    accumulator = ChoiceAccumulator(num_prompts=2, num_sequences=2)
    for index in range(4):
        accumulator.choices[index].add(update("a", index, token_ids=(1, 2, 3), num_cached_tokens=10 + index))
    assert accumulator.usage(50) == {
        "prompt_tokens": 50,
        "completion_tokens": 12,
        "total_tokens": 62,
        "prompt_tokens_details": {"cached_tokens": 10 + 12},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def test_an_answer_with_an_unfinished_choice_is_not_complete():
    accumulator = ChoiceAccumulator(1, 2)
    accumulator.choices[0].add(update(finish_reason="stop"))
    with pytest.raises(ServiceError, match="before it was complete"):
        accumulator.check_complete()
    accumulator.choices[1].add(update(finish_reason="length"))
    accumulator.check_complete()


@given(st.lists(st.tuples(st.integers(0, 2), st.text(max_size=3), st.integers(1, 3))))
def test_merging_loses_nothing_and_keeps_each_sequence_in_order(gains: list[tuple[int, str, int]]):
    batch = [
        SequenceUpdate(
            index=index, text=text, token_ids=(number,) * count, cumulative_logprob=-number, num_cached_tokens=index
        )
        for number, (index, text, count) in enumerate(gains)
    ]
    merged = {one.index: one for one in merge(batch)}
    for index in {gain[0] for gain in gains}:
        own = [one for one in batch if one.index == index]
        assert merged[index].text == "".join(one.text for one in own)
        assert merged[index].token_ids == sum((one.token_ids for one in own), ())
        assert merged[index].cumulative_logprob == own[-1].cumulative_logprob
        assert merged[index].num_cached_tokens == index


def test_a_merged_update_ends_as_its_last_part_does():
    (one,) = merge([update("a"), update("b", finish_reason="stop", stop_reason="x")])
    assert (one.text, one.finish_reason, one.stop_reason) == ("ab", "stop", "x")


def test_impossible_tokens_have_a_log_probability_that_json_can_hold():
    shape, offset = completion_logprobs([position("a", -math.inf, ("b", -math.inf))], 5)
    assert shape["token_logprobs"] == [-9999.0]
    assert shape["top_logprobs"] == [{"b": -9999.0, "a": -9999.0}]
    assert (shape["text_offset"], offset) == ([5], 6)


def test_the_likelier_of_two_tokens_with_one_text_stands_for_it():
    shape, _ = completion_logprobs([position("a", -3.0, ("a", -0.1), ("b", -1.0))], 0)
    assert shape["top_logprobs"] == [{"a": -0.1, "b": -1.0}]


def test_the_token_itself_comes_first_in_the_format_of_completions():
    shape, _ = completion_logprobs([position("c", -3.0, ("a", -0.1), ("c", -3.0)), position("d", -4.0, ("a", -0.1))], 0)
    assert [list(one) for one in shape["top_logprobs"]] == [["c", "a"], ["d", "a"]]


def test_chat_lists_candidates_best_first_with_their_bytes():
    content = chat_logprobs([position("a", -2.0, ("ü", -0.1), ("a", -2.0))])["content"]
    assert content[0]["top_logprobs"] == [
        {"token": "ü", "logprob": -0.1, "bytes": [0xC3, 0xBC]},
        {"token": "a", "logprob": -2.0, "bytes": [97]},
    ]


def test_tokens_are_ids_when_they_are_asked_for():
    positions = [position("a", -3.0, ("a", -0.1))]
    shape, offset = completion_logprobs(positions, 2, as_ids=True)
    assert (shape["tokens"], shape["top_logprobs"], shape["text_offset"]) == (
        ["token_id:1"],
        [{"token_id:1": -0.1}],
        [2],
    )
    assert offset == 3
    [token] = chat_logprobs(positions, as_ids=True)["content"]
    assert (token["token"], token["bytes"], token["top_logprobs"][0]["token"]) == ("token_id:1", [97], "token_id:1")


def test_the_best_choices_of_each_prompt_are_kept_with_their_new_places():
    accumulator = ChoiceAccumulator(2, 3, keep_token_ids=True)
    for index, logprob in enumerate([-3.0, -1.0, -2.0, -5.0, -6.0, -4.0]):
        gain = update(str(index), index, token_ids=(index,), num_cached_tokens=index, cumulative_logprob=logprob)
        accumulator.choices[index].add(gain)
    accumulator.keep_best(2)
    assert [(one.index, one.token_ids) for one in accumulator.choices] == [(0, [1]), (1, [2]), (2, [5]), (3, [3])]
    assert accumulator.num_cached_tokens == 0 + 3
    assert accumulator.usage(4)["completion_tokens"] == 4
