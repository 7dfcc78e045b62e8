import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, processors

from antiphon.shared.errors import ServiceError
from antiphon.shared.flags import SettingsError
from antiphon.shared.text.codec import Codec, NoCodec, load_codec, load_facts
from tests.tokenizer_files import HARD_TEXTS, byte_fallback, byte_level, token_id, write_tokenizer_files


def with_bos(tokenizer: Tokenizer) -> Tokenizer:
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    return tokenizer


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_tokenizer_files(tmp_path, with_bos(byte_level()))


def test_text_survives_encoding_and_decoding(directory: Path) -> None:
    codec = load_codec(directory)
    for text, ids in zip(HARD_TEXTS, codec.encode(HARD_TEXTS, add_special_tokens=False), strict=True):
        assert codec.decode(ids) == text


def test_a_token_is_known_by_its_id_and_text(directory: Path) -> None:
    codec, bos = load_codec(directory), token_id(byte_level(), "<s>")
    assert codec.has_token(bos, "<s>")
    assert not codec.has_token(bos, "</s>")
    assert not codec.has_token(10**6, "<s>")


def test_special_tokens_are_added_when_asked_for(directory: Path) -> None:
    codec = load_codec(directory)
    (bare,), (full,) = (codec.encode(["hello"], add_special_tokens=flag) for flag in (False, True))
    assert full == [token_id(byte_level(), "<s>"), *bare]
    assert codec.decode(full) == "<s>hello"
    assert codec.decode(full, skip_special_tokens=True) == "hello"
    assert set(full) & codec.special_ids == {full[0]}


def test_truncation_and_padding_of_the_file_are_not_used(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=16)
    codec = load_codec(write_tokenizer_files(tmp_path, tokenizer))
    (ids,) = codec.encode(["abcdefgh0123"], add_special_tokens=True)
    assert codec.decode(ids) == "abcdefgh0123"


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_a_tokens_text_reads_as_inside_a_text(make: type) -> None:
    codec = Codec(make())
    (ids,) = codec.encode(["one voice"], add_special_tokens=False)
    assert "".join(map(codec.token_text, ids)).strip() == "one voice"
    assert any(codec.token_text(i).startswith(" ") for i in ids)
    assert codec.token_text(make().token_to_id("<|end|>")) == "<|end|>"


def test_named_tokens_come_from_both_files_and_both_spellings(directory: Path) -> None:
    (directory / "special_tokens_map.json").write_text('{"unk_token": {"content": "<unk>"}, "bos_token": "<old>"}')
    named = load_facts(directory).named_tokens
    assert named == {"bos_token": "<s>", "eos_token": "<|end|>", "unk_token": "<unk>"}


def test_the_directorys_template_is_found_wherever_models_keep_it(directory: Path) -> None:
    config = directory / "tokenizer_config.json"
    assert load_facts(directory).chat_template is None
    config.write_text(
        json.dumps({"chat_template": [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]})
    )
    facts = load_facts(directory)
    assert (facts.chat_template, facts.template(True), facts.template(False)) == ("D", "T", "D")
    config.write_text(json.dumps({"chat_template": "C"}))
    assert load_facts(directory).chat_template == "C"
    (directory / "chat_template.json").write_text(json.dumps({"chat_template": "J"}))
    assert load_facts(directory).chat_template == "J"
    (directory / "chat_template.jinja").write_text("F")
    assert load_facts(directory).template(True) == "F"
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tool_use.jinja").write_text("G")
    assert (load_facts(directory).template(True), load_facts(directory).template(False)) == ("G", "F")


@pytest.mark.spec("S-SRV-029")
def test_a_given_template_is_a_file_or_the_template_itself_and_beats_the_directorys(directory: Path) -> None:
    (directory / "chat_template.jinja").write_text("own")
    file = directory / "other.jinja"
    file.write_text("from a file: {{ messages }}")
    assert load_facts(directory, str(file)).chat_template == "from a file: {{ messages }}"
    one_line = "{% for m in messages %}{{ m.content }}\\n{% endfor %}"
    assert load_facts(directory, one_line).chat_template == one_line.replace("\\n", "\n")


@pytest.mark.parametrize("given", ["/no/such/file.jinja", "neither a file nor a template", "x" * 200])
def test_a_given_template_that_is_neither_is_a_settings_error(directory: Path, given: str) -> None:
    with pytest.raises(SettingsError, match="--chat-template"):
        load_facts(directory, given)


@pytest.mark.parametrize("content", [None, "{}", "not json"])
def test_a_directory_without_a_usable_tokenizer_is_a_settings_error(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(SettingsError, match=r"tokenizer\.json"):
        load_codec(tmp_path)


def test_a_damaged_config_is_a_settings_error(directory: Path) -> None:
    (directory / "tokenizer_config.json").write_text("{")
    with pytest.raises(SettingsError, match="not valid JSON"):
        load_facts(directory)


def test_without_a_tokenizer_every_method_is_refused() -> None:
    given: dict[str, tuple[Any, ...]] = {
        "encode": (["a"],), "encode_pairs": ([("a", "b")],), "encode_infill": (["a"], "b"), "decode": ([1],),
        "knows": (1,), "has_token": (1, "a"), "token_text": (1,), "vocabulary_text": (1,),
    }  # fmt: skip
    assert given.keys() == {name for name, one in vars(Codec).items() if callable(one) and not name.startswith("_")}
    for name, arguments in given.items():
        named = {"add_special_tokens": False} if name.startswith("encode") else {}
        with pytest.raises(ServiceError, match="no tokenizer"):
            getattr(NoCodec(), name)(*arguments, **named)
    assert not hasattr(NoCodec(), "unknown")
