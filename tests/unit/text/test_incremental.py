"""Spaces between special tokens, for tokenizers whose decoder joins tokens with spaces."""

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models

from antiphon.shared.text.detokenization.incremental import start_detokenizer
from antiphon.shared.text.vocabulary import Vocabulary
from tests.tokenizer_files import byte_level, decoder_of, token_id


def word_pieces() -> Vocabulary:
    words = {"one": 0, "##s": 1, "two": 2}
    tokenizer = Tokenizer(models.WordPiece(words, unk_token="one"))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<a>", "<b>")])
    return Vocabulary(tokenizer, decoder_of(tokenizer))


A, B = 3, 4


@pytest.mark.parametrize(
    ("token_ids", "spaced", "joined"),
    [
        ([0, A, B, 2], "one <a> <b> two", "one <a><b> two"),
        ([A, B, A], "<a> <b> <a>", "<a><b><a>"),
        ([0, 1, A, 2, B], "ones <a> two <b>", "ones <a> two <b>"),
    ],
)
def test_special_tokens_in_a_row_are_joined_on_request(token_ids: list[int], spaced: str, joined: str) -> None:
    for spaces, text in ((True, spaced), (False, joined)):
        whole = start_detokenizer(word_pieces(), (), False, spaces)
        assert whole.push(token_ids) + whole.finish() == text
        # A stream that is opened again after any token continues with the same text.
        for cut in range(len(token_ids)):
            again = start_detokenizer(word_pieces(), (), False, spaces)
            assert again.push(token_ids[:cut]) + again.push(token_ids[cut:]) + again.finish() == text


def test_the_last_token_of_the_prompt_counts() -> None:
    for spaces, text in ((True, " <b>"), (False, "<b>")):
        assert start_detokenizer(word_pieces(), [0, A], False, spaces).push([B]) == text


def test_a_decoder_without_spaces_has_none_to_leave_out() -> None:
    tokenizer = byte_level()
    vocabulary = Vocabulary(tokenizer, decoder_of(tokenizer))
    special = [token_id(tokenizer, name) for name in ("<s>", "<|end|>")]
    for spaces in (True, False):
        assert start_detokenizer(vocabulary, (), False, spaces).push(special) == "<s><|end|>"
