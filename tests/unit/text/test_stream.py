import functools
import struct
from typing import Any

import pytest

from antiphon.shared.codec import pack_ids
from antiphon.shared.limits import STREAM_EVENT_TOKENS_MAX
from antiphon.shared.messages import OpenStream, PromptLogprobs, TextEvent, TokenEvent, TokenLogprobs, TopLogprob
from antiphon.shared.text.detokenization.stream import TextStream
from antiphon.shared.text.vocabulary import UnknownTokenError, Vocabulary
from tests.tokenizer_files import byte_level, decoder_of


@functools.cache
def tokenizer() -> Any:
    return byte_level()


@functools.cache
def vocabulary() -> Vocabulary:
    return Vocabulary(tokenizer(), decoder_of(tokenizer()))


def ids_of(text: str) -> tuple[int, ...]:
    return tuple(tokenizer().encode(text).ids)


def letters(text: str) -> tuple[int, ...]:
    """One token for each character."""
    return tuple(tokenizer().token_to_id("Ġ" if c == " " else c) for c in text)


def open_stream(output: tuple[int, ...] = (), **options: Any) -> TextStream:
    message = OpenStream(
        sequence_id="r",
        attempt=1,
        model="",
        reply_subject="reply",
        engine_subject="engine",
        output_token_ids=pack_ids(output),
        **options,
    )
    return TextStream(message, vocabulary())


def event(position: int, token_ids: tuple[int, ...], **options: Any) -> TokenEvent:
    return TokenEvent(sequence_id="r", attempt=1, position=position, token_ids=token_ids, **options)


def feed(stream: TextStream, token_ids: tuple[int, ...], size: int = 1, **last: Any) -> list[TextEvent]:
    start, texts = stream.sequencer.position, list[TextEvent]()
    for i in range(0, len(token_ids), size):
        options = last if i + size >= len(token_ids) else {}
        texts += stream.push(event(start + i, token_ids[i : i + size], **options))
    return texts


def joined(texts: list[TextEvent]) -> str:
    return "".join(text.text for text in texts)


def test_each_token_event_gives_one_text_event_with_its_place() -> None:
    first, second = feed(open_stream(), letters("ab"))
    assert (first.position, first.token_ids, first.text_offset, first.text) == (0, letters("a"), 0, "a")
    assert (second.position, second.text_offset, second.text, second.finish_reason) == (1, 1, "b", None)


def test_tokens_of_an_unfinished_character_are_reported_without_text() -> None:
    ids = ids_of("\U0001f9f5")
    texts = feed(open_stream(), ids, finish_reason="length")
    assert [text.text for text in texts] == [*[""] * (len(ids) - 1), "\U0001f9f5"]
    assert texts[-1].finish_reason == "length"


def test_the_last_event_has_all_text() -> None:
    stream = open_stream(stop=("xyz",))
    last = feed(stream, (*letters("axy"), ids_of("\U0001f9f5")[0]), finish_reason="length")[-1]
    assert (last.text_offset, last.text) == (1, "xy\ufffd")


@pytest.mark.spec("S-API-030")
@pytest.mark.parametrize("size", [1, 2, 5, 40])
@pytest.mark.parametrize(("include", "expected"), [(False, "one two"), (True, "one two END")])
def test_a_stop_string_ends_the_text_and_the_tokens(size: int, include: bool, expected: str) -> None:
    stream = open_stream(stop=("nothing", " END"), include_stop_str_in_output=include)
    token_ids = letters("one two ENDless")
    texts = feed(stream, token_ids, size)
    assert joined(texts) == expected
    assert (texts[-1].finish_reason, texts[-1].stop_reason) == ("stop", " END")
    assert tuple(i for text in texts for i in text.token_ids) == letters("one two END")
    assert stream.finished
    assert stream.stopped
    assert stream.push(event(stream.sequencer.position, letters("x"))) == []


def test_a_stop_string_beats_the_engines_own_end_at_the_same_token() -> None:
    stream = open_stream(stop=("b",))
    (text,) = stream.push(event(0, letters("ab"), finish_reason="length"))
    assert (text.text, text.finish_reason, text.stop_reason) == ("a", "stop", "b")
    assert not stream.stopped


@pytest.mark.spec("S-API-014")
@pytest.mark.parametrize("size", [1, 3])
def test_a_stop_string_within_min_tokens_is_ordinary_text(size: int) -> None:
    texts = feed(open_stream(stop=("b",), min_tokens=2), letters("abbc"), size)
    assert joined(texts) == "ab"
    assert tuple(i for text in texts for i in text.token_ids) == letters("abb")


@pytest.mark.spec("S-API-031")
def test_a_stop_token_stays_in_the_text_unless_it_is_special() -> None:
    plain = letters("z")[0]
    (text,) = open_stream().push(event(0, (plain,), finish_reason="stop", stop_token_id=plain))
    assert (text.text, text.stop_reason, text.token_ids) == ("z", plain, (plain,))
    special = tokenizer().token_to_id("<|end|>")
    (text,) = open_stream().push(event(0, (special,), finish_reason="stop", stop_token_id=special))
    assert (text.text, text.stop_reason, text.token_ids) == ("", special, (special,))


def test_special_tokens_are_text_when_they_are_not_skipped() -> None:
    special = tokenizer().token_to_id("<|end|>")
    (text,) = open_stream(skip_special_tokens=False).push(event(0, (special,)))
    assert text.text == "<|end|>"


def test_the_prompts_tail_joins_the_first_output_token() -> None:
    ids = ids_of("\U0001f9f5")
    stream = open_stream(prompt_token_ids=pack_ids(ids[:1]))
    assert joined(feed(stream, ids[1:])) == "\U0001f9f5"


@pytest.mark.parametrize("stops", [(), ("STOP",)])
def test_a_stream_opened_at_any_token_goes_on_with_the_same_text(stops: tuple[str, ...]) -> None:
    token_ids = (*ids_of("Zażółć \U0001f9f5 gęślą"), *letters("ST ST"), *letters("STOP more"))
    whole = feed(open_stream(stop=stops), token_ids)
    for cut in range(len(whole)):
        shown = joined(whole[:cut])
        moved = open_stream(token_ids[:cut], text_offset=len(shown), stop=stops)
        rest = feed(moved, token_ids[cut:])
        assert rest == whole[cut:]


def test_text_that_the_owner_lacks_comes_with_the_first_event() -> None:
    stream = open_stream(letters("abc"), text_offset=1)
    (text,) = stream.push(event(3, letters("d")))
    assert (text.position, text.text_offset, text.text) == (3, 1, "bcd")


def test_a_stop_string_in_the_owners_tokens_is_told_when_the_engine_is_heard() -> None:
    stream = open_stream(letters("abc"), text_offset=1, stop=("c",))
    (text,) = stream.push(event(3, letters("d")))
    assert (text.position, text.token_ids, text.text, text.finish_reason, text.stop_reason) == (3, (), "b", "stop", "c")
    assert stream.stopped


def test_a_gap_is_reported_until_it_is_filled() -> None:
    stream = open_stream()
    assert stream.gap is None
    assert stream.push(event(1, letters("b"))) == []
    assert stream.gap == 0
    assert joined(stream.push(event(0, letters("a")))) == "ab"
    assert stream.gap is None


@pytest.mark.parametrize("bad", [10**6, -1, 2**40])
def test_a_token_that_does_not_exist_ends_the_stream_with_an_error(bad: int) -> None:
    stream = open_stream(stop=("bb",))
    feed(stream, letters("ab"))
    (text,) = stream.push(event(2, (*letters("x"), bad)))
    assert (text.finish_reason, text.error_code, text.position, text.token_ids) == ("error", "engine_failure", 2, ())
    assert text.text == "b"
    assert stream.finished
    assert stream.stopped


def test_an_engines_error_is_passed_on_with_what_text_there_is() -> None:
    stream = open_stream(stop=("ab",))
    texts = feed(stream, letters("a"))
    texts += stream.push(event(1, (), finish_reason="error", error_code="engine_failure", error_message="It broke."))
    assert joined(texts) == "a"
    assert (texts[-1].error_code, texts[-1].error_message) == ("engine_failure", "It broke.")


def test_log_probabilities_come_with_each_tokens_text_and_bytes() -> None:
    first = ids_of("\U0001f9f5")[0]
    logprobs = (TokenLogprobs(-0.5, (TopLogprob(letters("a")[0], -0.5), TopLogprob(first, -1.5))),)
    (text,) = open_stream().push(
        event(0, letters("a"), logprobs=logprobs, cumulative_logprob=-2.0, num_cached_tokens=16)
    )
    (position,) = text.logprobs
    assert (position.chosen.token, position.chosen.token_bytes, position.chosen.logprob) == ("a", b"a", -0.5)
    assert (position.top[1].token, position.top[1].token_bytes) == ("\ufffd", vocabulary().pieces[first])
    assert (text.cumulative_logprob, text.num_cached_tokens) == (-2.0, 16)


def test_what_lies_behind_a_stop_string_is_in_no_sum() -> None:
    logprobs = tuple(TokenLogprobs(value) for value in (-1.0, -2.0, -4.0))
    (text,) = open_stream(stop=("b",)).push(event(0, letters("abc"), logprobs=logprobs, cumulative_logprob=-7.0))
    assert len(text.logprobs) == len(text.token_ids) == 2
    assert text.cumulative_logprob == pytest.approx(-3.0)


def test_a_long_replay_is_cut_into_several_events() -> None:
    token_ids = letters("abcdefgh") * 20
    logprobs = tuple(TokenLogprobs(-1.0) for _ in token_ids)
    whole = event(0, token_ids, logprobs=logprobs, cumulative_logprob=-160.0, finish_reason="length")
    texts = open_stream().push(whole)
    assert [len(text.token_ids) for text in texts] == [STREAM_EVENT_TOKENS_MAX, STREAM_EVENT_TOKENS_MAX, 32]
    assert joined(texts) == "abcdefgh" * 20
    assert [text.cumulative_logprob for text in texts] == [-64.0, -128.0, -160.0]
    assert [text.finish_reason for text in texts] == [None, None, "length"]


def test_a_stream_cannot_be_opened_with_tokens_that_do_not_exist() -> None:
    with pytest.raises(UnknownTokenError):
        open_stream((10**6,))


def test_a_stream_without_text_has_the_tokens_and_log_probabilities_alone() -> None:
    logprobs = (TokenLogprobs(-0.5, (TopLogprob(letters("b")[0], -1.0),)),)
    stream = open_stream(detokenize=False)
    [text] = feed(stream, letters("a"), finish_reason="length", logprobs=logprobs)
    assert (text.text, text.token_ids, text.finish_reason) == ("", letters("a"), "length")
    [position] = text.logprobs
    assert (position.chosen.token_id, position.chosen.token, position.top[0].token) == (letters("a")[0], "", "")


def test_a_stream_without_text_still_knows_the_vocabulary() -> None:
    stream = open_stream(detokenize=False)
    assert feed(stream, (10**6,))[-1].finish_reason == "error"


def test_log_probabilities_of_a_prompt_get_their_text_and_move_nothing() -> None:
    stream = open_stream()
    first, second, other = letters("abc")
    part = PromptLogprobs(
        start=3, token_ids=pack_ids([first, second]), logprobs=struct.pack("<2f", -0.5, -1.5), num_top=1,
        top_token_ids=pack_ids([other, second]), top_logprobs=struct.pack("<2f", -0.25, -1.5),
    )  # fmt: skip
    [text] = stream.push(event(0, (), prompt_logprobs=part))
    assert (text.position, text.token_ids, text.text, text.prompt_start) == (0, (), "", 3)
    chosen = [(one.chosen.token_id, one.chosen.token, one.chosen.logprob) for one in text.prompt_logprobs]
    assert chosen == [(first, "a", -0.5), (second, "b", -1.5)]
    assert [[top.token for top in one.top] for one in text.prompt_logprobs] == [["c"], ["b"]]
    assert feed(stream, letters("ab"))[0].position == 0


def test_a_prompt_with_an_unknown_token_ends_the_stream_with_an_error() -> None:
    part = PromptLogprobs(start=1, token_ids=pack_ids([10**6]), logprobs=struct.pack("<f", -0.5))
    [text] = open_stream().push(event(0, (), prompt_logprobs=part))
    assert text.error_code == "engine_failure"
