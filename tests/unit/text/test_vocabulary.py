from pathlib import Path

import pytest

from antiphon.shared.flags import SettingsError
from antiphon.shared.text.detokenization.incremental import ByteDetokenizer, WindowDetokenizer, start_detokenizer
from antiphon.shared.text.pieces import piece_rule
from antiphon.shared.text.vocabulary import UnknownTokenError, Vocabulary, load_vocabulary
from tests.tokenizer_files import TOKENIZERS, byte_fallback, byte_level, decoder_of, token_id, write_tokenizer_files


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_every_usual_decoder_is_read_by_bytes_and_others_by_a_window(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]()
    vocabulary = Vocabulary(tokenizer, decoder_of(tokenizer))
    expected = WindowDetokenizer if kind == "suffixed" else ByteDetokenizer
    assert type(start_detokenizer(vocabulary, [], True)) is expected


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        {"type": "WordPiece", "prefix": "##", "cleanup": True},
        {"type": "Sequence", "decoders": [{"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
        {"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 2, "stop": 0}]},
        {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"Regex": "a+"}, "content": ""}]},
        {"type": "CTC", "pad_token": "<pad>"},
    ],
)
def test_a_decoder_whose_text_is_not_the_sum_of_its_tokens_has_no_rule(decoder: dict[str, object] | None) -> None:
    assert piece_rule(decoder) is None


def test_a_token_has_its_exact_bytes_and_a_readable_text(tmp_path: Path) -> None:
    directory = write_tokenizer_files(tmp_path, byte_level())
    vocabulary = load_vocabulary(directory, directory)
    tokenizer = byte_level()
    spade = tokenizer.encode("\U0001f9f5").ids
    assert b"".join(vocabulary.token_bytes[i] for i in spade) == "\U0001f9f5".encode()
    assert vocabulary.token_text(spade[0]) == "\ufffd"
    end = token_id(tokenizer, "<|end|>")
    assert vocabulary.token_text(end) == "<|end|>"
    assert end in vocabulary.special_ids


def test_a_leading_space_belongs_to_a_tokens_text() -> None:
    tokenizer = byte_fallback()
    vocabulary = Vocabulary(tokenizer, decoder_of(tokenizer))
    marked = next(token for token in tokenizer.get_vocab() if token.startswith("▁") and token[1:].isalpha())
    assert vocabulary.token_text(token_id(tokenizer, marked)) == " " + marked[1:]
    assert vocabulary.token_bytes[token_id(tokenizer, "<0xE2>")] == b"\xe2"


def test_ids_in_a_models_rounded_up_vocabulary_have_no_text_and_ids_beyond_are_unknown(tmp_path: Path) -> None:
    directory = write_tokenizer_files(tmp_path, byte_level())
    (directory / "config.json").write_text('{"text_config": {"vocab_size": 512}}')
    vocabulary = load_vocabulary(directory, directory)
    assert vocabulary.token_text(511) == ""
    assert start_detokenizer(vocabulary, [], True).push([511]) == ""
    for unknown in (512, -1, 2**40):
        with pytest.raises(UnknownTokenError):
            start_detokenizer(vocabulary, [], True).push([unknown])


@pytest.mark.parametrize("content", [None, b"{}", b"not json", b"\xff\xfe"])
def test_a_directory_without_a_usable_tokenizer_is_a_settings_error(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(SettingsError, match="tokenizer"):
        load_vocabulary(tmp_path, tmp_path)
