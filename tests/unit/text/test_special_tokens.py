"""Special tokens in texts of users: none is left, however the texts are put together."""

from hypothesis import given
from hypothesis import strategies as st

from antiphon.shared.text.codec import Codec
from antiphon.shared.text.special_tokens import SpecialTokens
from tests.tokenizer_files import byte_level

TOKENS = ("<|end|>", "<|end|>>", "<s>", "|end", "[INST]", "ab", "<")
PIECES = ("<", "<|", "|", "end", "|>", ">", "s", "[", "INST", "]", "a", "b", " ", "\n", "\u200b", "é")
ESCAPED = SpecialTokens(TOKENS)
texts = st.lists(st.sampled_from((*PIECES, *TOKENS)), max_size=12).map("".join)


@given(st.lists(texts, max_size=4), st.booleans())
def test_no_special_token_is_left_and_nothing_else_is_changed(given_: list[str], trims: bool) -> None:
    broken = list(map(ESCAPED.broken, given_))
    joined = "".join(each.rstrip() for each in broken) if trims else "".join(broken)
    assert not any(token in joined for token in TOKENS if len(token) > 1)
    for before, after in zip(given_, broken, strict=True):
        assert before.replace("\u200b", "") == after.replace("\u200b", "")


def test_a_text_without_special_tokens_is_not_changed() -> None:
    value = {"role": "user", "content": ["a < b, <|x|> é\u200b", 1, None, {"text": "x"}], "n": 1.5}
    assert ESCAPED.broken(value) == value
    assert SpecialTokens(()).broken("<s>") == "<s>"


def test_texts_in_objects_and_lists_are_broken() -> None:
    assert ESCAPED.broken({"a<s>": [{"text": "x<s>y"}, "[INST]"]}) == {
        "a<\u200bs>": [{"text": "x<\u200bs>y"}, "[\u200bINST]"]
    }


def test_a_broken_token_is_encoded_as_text() -> None:
    codec = Codec(byte_level())
    assert codec.special_texts
    escaped = SpecialTokens(codec.special_texts)
    for token in codec.special_texts:
        [plain], [broken] = (
            codec.encode([text], add_special_tokens=False) for text in (token, escaped.broken(f"a{token}b"))
        )
        assert set(plain) <= codec.special_ids
        assert not codec.special_ids & set(broken)
        assert codec.decode(broken).replace("\u200b", "") == f"a{token}b"
