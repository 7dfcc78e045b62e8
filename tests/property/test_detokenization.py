"""P-04 and P-05: the text of a stream is what the tokenizer library makes of all tokens, however they are cut up."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from antiphon.shared.text.detokenization.incremental import (
    ByteDetokenizer,
    Detokenizer,
    WindowDetokenizer,
    start_detokenizer,
)
from antiphon.shared.text.detokenization.stop_strings import StopStrings
from antiphon.shared.text.vocabulary import Vocabulary
from tests.tokenizer_files import HARD_TEXTS, TOKENIZERS, decoder_of, token_id

KINDS = tuple(TOKENIZERS)
BYTE_KINDS = tuple(kind for kind in KINDS if kind != "suffixed")
few = settings(max_examples=40)


@functools.cache
def tokenizer_of(kind: str) -> Tokenizer:
    return TOKENIZERS[kind]()


@functools.cache
def vocabulary_of(kind: str) -> Vocabulary:
    tokenizer = tokenizer_of(kind)
    return Vocabulary(tokenizer, decoder_of(tokenizer))


@functools.cache
def window_vocabulary_of(kind: str) -> Vocabulary:
    return Vocabulary(tokenizer_of(kind), None)


def deltas(detokenizer: Detokenizer, parts: Sequence[Sequence[int]]) -> list[str]:
    return [*(detokenizer.push(part) for part in parts), detokenizer.finish()]


def singles(token_ids: Sequence[int]) -> list[list[int]]:
    return [[token_id] for token_id in token_ids]


texts = st.one_of(st.sampled_from(HARD_TEXTS), st.text(max_size=30), st.lists(st.sampled_from(HARD_TEXTS)).map("".join))


def token_ids(kind: str) -> st.SearchStrategy[list[int]]:
    """Any tokens at all, and tokens that spell a text."""
    size = tokenizer_of(kind).get_vocab_size()
    encoded = texts.map(lambda text: tokenizer_of(kind).encode(text, add_special_tokens=False).ids)
    return st.one_of(st.lists(st.integers(0, size - 1), max_size=24), encoded)


@st.composite
def split(draw: Callable[..., Any], items: list[int]) -> list[list[int]]:
    cuts = sorted(draw(st.lists(st.integers(0, len(items)), max_size=6)))
    return [items[a:b] for a, b in zip([0, *cuts], [*cuts, len(items)], strict=True)]


def library_text(kind: str, ids: list[int], skip: bool) -> str:
    return tokenizer_of(kind).decode(ids, skip_special_tokens=skip)


def good_byte_runs(kind: str, ids: list[int], skip: bool) -> bool:
    """False when a run of byte tokens is no UTF-8: then the library gives up the good characters of the run too."""
    vocabulary, run = vocabulary_of(kind), b""
    for one in [*ids, -1]:
        string = tokenizer_of(kind).id_to_token(one) if one >= 0 else ""
        assert string is not None
        if string.startswith("<0x"):
            run += vocabulary.pieces[one]
        elif not (skip and one in vocabulary.special_ids):
            if run and not _is_text(run):
                return False
            run = b""
    return True


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


@pytest.mark.matrix("P-04")
@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@few
def test_the_joined_deltas_are_the_librarys_text_for_any_split(kind: str, skip: bool, data: st.DataObject) -> None:
    ids = data.draw(token_ids(kind))
    parts = data.draw(split(ids))
    text = "".join(deltas(start_detokenizer(vocabulary_of(kind), [], skip), parts))
    if "fallback" not in kind or good_byte_runs(kind, ids, skip):
        assert text == library_text(kind, ids, skip)
    assert text == "".join(deltas(start_detokenizer(vocabulary_of(kind), [], skip), singles(ids)))


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@few
def test_single_special_tokens_can_be_shown_while_the_others_are_skipped(kind: str, data: st.DataObject) -> None:
    ids = data.draw(token_ids(kind))
    shown, hidden = (token_id(tokenizer_of(kind), text) for text in ("<s>", "<|end|>"))
    ids = [data.draw(st.sampled_from([one, shown, hidden])) for one in ids]
    rest = [one for one in ids if one == shown or one not in vocabulary_of(kind).special_ids]
    text = "".join(
        deltas(
            start_detokenizer(vocabulary_of(kind), [], True, shown_special_tokens=("<s>", "none")),
            data.draw(split(ids)),
        )
    )
    assert text == "".join(deltas(start_detokenizer(vocabulary_of(kind), [], False), singles(rest)))


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@few
def test_text_behind_a_prompt_is_what_the_library_adds_to_the_prompts_text(kind: str, data: st.DataObject) -> None:
    tokenizer = tokenizer_of(kind)
    prompt = tokenizer.encode(data.draw(st.sampled_from(HARD_TEXTS[:4])), add_special_tokens=False).ids[-8:]
    output = tokenizer.encode(data.draw(texts), add_special_tokens=False).ids
    whole, before = library_text(kind, prompt + output, True), library_text(kind, prompt, True)
    text = "".join(deltas(start_detokenizer(vocabulary_of(kind), prompt, True), singles(output)))
    assert whole == before + text


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@few
def test_a_delta_never_shows_a_character_that_later_tokens_complete(kind: str, data: st.DataObject) -> None:
    text = data.draw(texts.filter(lambda text: "\ufffd" not in text))
    ids = tokenizer_of(kind).encode(text, add_special_tokens=False).ids
    shown = ""
    detokenizer = start_detokenizer(vocabulary_of(kind), [], False)
    whole = library_text(kind, ids, False)
    for delta in deltas(detokenizer, singles(ids)):
        assert "\ufffd" not in delta
        shown += delta
        assert whole.startswith(shown)


@pytest.mark.parametrize("kind", ["byte level", "metaspace, never"])
@given(data=st.data())
@few
def test_the_window_and_the_bytes_give_the_same_text(kind: str, data: st.DataObject) -> None:
    ids = tokenizer_of(kind).encode(data.draw(texts), add_special_tokens=False).ids
    window = WindowDetokenizer(window_vocabulary_of(kind), [], True)
    quick = ByteDetokenizer(vocabulary_of(kind), [], True)
    assert "".join(deltas(window, singles(ids))) == "".join(deltas(quick, singles(ids)))


@pytest.mark.matrix("P-04")
@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@few
def test_a_stream_restarted_at_any_token_gives_the_same_text(kind: str, data: st.DataObject) -> None:
    ids = data.draw(token_ids(kind))
    vocabulary = vocabulary_of(kind)
    whole = deltas(start_detokenizer(vocabulary, ids[:2], True), singles(ids))
    cut = data.draw(st.integers(0, len(ids)))
    again = start_detokenizer(vocabulary, ids[:2], True)
    assert again.push(ids[:cut]) == "".join(whole[:cut])
    assert deltas(again, singles(ids[cut:])) == whole[cut:]


def test_good_characters_survive_a_bad_byte_behind_them() -> None:
    # The library's own decoding of the whole list would take the snowman back.
    tokenizer, kind = tokenizer_of("byte fallback"), "byte fallback"
    ids = [token_id(tokenizer, f"<0x{byte:02X}>") for byte in (*"☃".encode(), 0xFF, 0xE2, 0x98)]
    assert deltas(start_detokenizer(vocabulary_of(kind), [], True), singles(ids)) == [
        "", "", "☃", "\ufffd", "", "", "\ufffd\ufffd",
    ]  # fmt: skip
    assert library_text(kind, ids, True) == "\ufffd" * 6


# --- stop strings -----------------------------------------------------------------------------------------------------

letters = st.text("ab", max_size=12)
stop_lists = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3)


def naive(text: str, stops: Sequence[str], include: bool, exempt: int = 0) -> tuple[str, str | None]:
    """The first character at which a stop string is complete; the longest of those that are."""
    for end in range(exempt + 1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return (text[:end] if include else text[: end - len(stop)]), stop
    return text, None


@pytest.mark.matrix("P-05")
@pytest.mark.parametrize("include", [True, False])
@given(parts=st.lists(letters, max_size=5), stops=stop_lists)
@settings(max_examples=200)
def test_stop_strings_over_any_boundaries_match_a_search_of_the_whole_text(
    include: bool, parts: list[str], stops: list[str]
) -> None:
    search = StopStrings(stops, include)
    shown, winner = "", None
    for part in parts:
        text, winner = search.push(part)
        shown += text
        assert naive("".join(parts), stops, include)[0].startswith(shown)
        if winner:
            break
    else:
        shown += search.finish()
    assert (shown, winner) == naive("".join(parts), stops, include)


@given(before=st.lists(letters, max_size=3), after=st.lists(letters, max_size=3), stops=stop_lists)
@settings(max_examples=200)
def test_a_stop_string_that_ends_before_min_tokens_is_ordinary_text(
    before: list[str], after: list[str], stops: list[str]
) -> None:
    search = StopStrings(stops, include=False)
    shown = "".join(search.push(part, counts=False)[0] for part in before)
    winner = None
    for part in after:
        text, winner = search.push(part)
        shown += text
        if winner:
            break
    else:
        shown += search.finish()
    exempt = sum(map(len, before))
    expected, stop = naive("".join([*before, *after]), stops, False, exempt)
    assert winner == stop
    # What was shown before the stop counted stays shown, even where the winner overlaps it.
    assert shown == expected or (stop is not None and shown.startswith(expected))
