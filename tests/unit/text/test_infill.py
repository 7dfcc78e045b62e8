"""Prompts for filling in text, by the special tokens of code models."""

import pytest
from tokenizers import AddedToken, Tokenizer

from antiphon.shared.errors import ServiceError
from antiphon.shared.text.codec import Codec, NoCodec
from tests.tokenizer_files import byte_fallback, byte_level, token_id

FAMILIES = {
    "CodeLlama": ("▁<PRE>", "▁<SUF>", "▁<MID>"),
    "StarCoder": ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    "SantaCoder": ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    "Qwen Coder": ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    "DeepSeek Coder": ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
}


def with_tokens(tokenizer: Tokenizer, *names: str) -> Tokenizer:
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    return tokenizer


@pytest.mark.spec("S-API-028")
@pytest.mark.parametrize("names", FAMILIES.values(), ids=FAMILIES)
def test_prefix_suffix_and_middle_are_marked_by_the_models_own_tokens(names: tuple[str, str, str]) -> None:
    tokenizer = with_tokens(byte_level(), *names)
    first, second, third = map(tokenizer.token_to_id, names)
    codec = Codec(tokenizer)
    prompts = codec.encode_infill(["one", "two"], " end", add_special_tokens=False)
    for text, prompt in zip(("one", "two"), prompts, strict=True):
        before, after = (codec.encode([part], add_special_tokens=False)[0] for part in (text, " end"))
        assert prompt == [first, *before, second, *after, third]


@pytest.mark.spec("S-API-028")
def test_a_tokenizer_without_such_tokens_refuses_a_suffix() -> None:
    for names in ((), ("<fim_prefix>", "<fim_suffix>")):
        with pytest.raises(ServiceError, match="'suffix' is not supported") as error:
            Codec(with_tokens(byte_level(), *names)).encode_infill(["a"], "b", add_special_tokens=True)
        assert (error.value.code, error.value.param) == ("unsupported_parameter", "suffix")
    with pytest.raises(ServiceError, match="no tokenizer"):
        NoCodec().encode_infill(["a"], "b", add_special_tokens=True)


@pytest.mark.parametrize("suffix", ["end", " end", "  end", "\nend", "é", "1"])
def test_the_suffix_gets_no_space_that_it_does_not_have(suffix: str) -> None:
    names = FAMILIES["CodeLlama"]
    tokenizer = with_tokens(byte_fallback(), *names)
    codec = Codec(tokenizer)
    [prompt] = codec.encode_infill(["the"], suffix, add_special_tokens=False)
    after = prompt[prompt.index(token_id(tokenizer, names[1])) + 1 : -1]
    anchor = codec.encode(["a"], add_special_tokens=False)[0]
    assert codec.decode([*anchor, *after]) == "a" + suffix


def test_the_tokens_that_end_a_filled_in_text_are_those_that_the_vocabulary_has() -> None:
    tokenizer = with_tokens(byte_level(), *FAMILIES["CodeLlama"], "▁<EOT>")
    assert Codec(tokenizer).infill_end_ids == (tokenizer.token_to_id("▁<EOT>"),)
    assert Codec(with_tokens(byte_level(), *FAMILIES["CodeLlama"])).infill_end_ids == ()
    assert Codec(byte_level()).infill_end_ids == ()
