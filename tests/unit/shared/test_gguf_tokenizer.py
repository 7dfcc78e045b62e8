"""Tokenizers of GGUF files against the tokenizers that they were written from."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from antiphon.shared.models.gguf_model.reader import GgufError, GgufModel
from antiphon.shared.models.gguf_model.tokenizer import tokenizer_documents
from tests.tokenizer_files import token_id

RECORDED = json.loads((Path(__file__).parents[2] / "golden" / "sentencepiece.json").read_text())
"""Made by sentencepiece 0.2.3: pieces with scores and types, and what it encodes."""
TEXTS = (
    "Hello world, it's 12345 o'clock.", "  two  spaces\n\n\tand tabs ", "naïve café e\u0301 好的 🙂",
    "WE'LL seeIT: a/b/c--d",
    "<s>not special? yes<end>", "def f(x):\n    return x ** 2\r\n",
)  # fmt: skip
CONTROL, USER, NORMAL = gguf.TokenType.CONTROL, gguf.TokenType.USER_DEFINED, gguf.TokenType.NORMAL


def write(path: Path, fill: Callable[[gguf.GGUFWriter], None]) -> GgufModel:
    writer = gguf.GGUFWriter(path, "llama")
    fill(writer)
    writer.add_tensor("plain", np.ones((2, 4), dtype=np.float32))
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    return GgufModel(path)


def read(model: GgufModel) -> tuple[Tokenizer, dict[str, Any]]:
    document, config = tokenizer_documents(model)
    return Tokenizer.from_str(json.dumps(document)), config


# --- SentencePiece ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["prefix", "no prefix"])
def test_a_sentencepiece_tokenizer_encodes_as_sentencepiece_does(which: str, tmp_path: Path) -> None:
    recorded = RECORDED[which]

    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(recorded["pieces"])
        writer.add_token_scores(recorded["scores"])
        writer.add_token_types(recorded["types"])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)
        writer.add_add_space_prefix(which == "prefix")

    tokenizer, config = read(write(tmp_path / "m.gguf", fill))
    for text, ids in recorded["encoded"].items():
        assert tokenizer.encode(text, add_special_tokens=False).ids == ids, text
        assert tokenizer.encode(text).ids == [1, *ids]
        assert tokenizer.decode(ids) == text
    assert (config["bos_token"], config["eos_token"], config["add_bos_token"]) == ("<s>", "</s>", True)


def test_characters_are_merged_in_the_order_of_a_list(tmp_path: Path) -> None:
    """As in Gemma 4: the files have merges and no prefix, and bytes stand for characters without a token."""
    source = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    source.normalizer = normalizers.Replace(" ", "▁")
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    source.decoder = decoders.Sequence(parts)
    special = ["<pad>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=340, special_tokens=special, show_progress=False)
    source.train_from_iterator(["it's seven o'clock in the world\n\n" * 9, "  two  spaces\n\n\n"], trainer)
    document = json.loads(source.to_str())
    source = Tokenizer.from_str(json.dumps(document | {"added_tokens": []}))

    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gemma4")
        writer.add_token_list([source.id_to_token(index) or "" for index in range(source.get_vocab_size())])
        writer.add_token_merges([" ".join(merge) for merge in document["model"]["merges"]])
        writer.add_bos_token_id(1)
        writer.add_unk_token_id(2)

    tokenizer, config = read(write(tmp_path / "m.gguf", fill))
    for text in TEXTS:
        ids = source.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text).ids == [1, *ids]
        assert tokenizer.decode(ids) == source.decode(ids)
    assert config["add_bos_token"]


# --- bytes ------------------------------------------------------------------------------------------------------------

GPT4_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""As the tokenizer.json of Llama 3 has it."""


def trained(split: pre_tokenizers.PreTokenizer, normalizer: Any = None) -> Tokenizer:
    """A byte-level tokenizer of a few hundred merges with two special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = split, decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([*TEXTS, "it's seven o'clock in the world " * 9, "123 456 789 12 34"], trainer)
    tokenizer.add_special_tokens([AddedToken("<s>", special=True, normalized=False)])
    tokenizer.add_tokens([AddedToken("<end>", special=False, normalized=False)])
    return tokenizer


def split_by(pattern: str) -> pre_tokenizers.PreTokenizer:
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), bytes_of])


GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
BYTE_LEVEL: dict[str, tuple[pre_tokenizers.PreTokenizer, Any]] = {
    "gpt-2": (GPT2, None),
    "llama-bpe": (split_by(GPT4_SPLIT), None),
    "lfm2": (split_by(GPT4_SPLIT), None),
    "qwen2": (split_by(GPT4_SPLIT.replace("{1,3}", "")), normalizers.NFC()),
    "qwen35": (
        split_by(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
            r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        ),
        normalizers.NFC(),
    ),
    "kimi-k2": (
        split_by(
            r"[\p{Han}]+"
            r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
            r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
            r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        ),
        None,
    ),
    "smollm": (pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2]), None),
}
BEGINNING = ("llama-bpe", "lfm2")
"""Those whose prompts begin with a token."""


def fill_from(tokenizer: Tokenizer, pre: str | None) -> Callable[[gguf.GGUFWriter], None]:
    document = json.loads(tokenizer.to_str())
    size = tokenizer.get_vocab_size()
    tokens = [tokenizer.id_to_token(index) or "" for index in range(size)]
    kinds = {"<s>": CONTROL, "<end>": USER}

    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        if pre is not None:
            writer.add_tokenizer_pre(pre)
        writer.add_token_list([*tokens, "[PAD]", "[PAD]"])
        writer.add_token_types(
            [*(kinds.get(text, NORMAL) for text in tokens), gguf.TokenType.UNUSED, gguf.TokenType.UNUSED]
        )
        writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in document["model"]["merges"]])
        writer.add_bos_token_id(tokens.index("<s>"))

    return fill


@pytest.mark.parametrize("pre", BYTE_LEVEL)
def test_a_byte_level_tokenizer_encodes_as_the_one_it_was_made_from(pre: str, tmp_path: Path) -> None:
    source = trained(*BYTE_LEVEL[pre])
    tokenizer, config = read(write(tmp_path / "m.gguf", fill_from(source, pre)))
    begin = [source.token_to_id("<s>")]
    for text in TEXTS:
        ids = source.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, add_special_tokens=False).ids == ids, text
        assert tokenizer.encode(text).ids == (begin if pre in BEGINNING else []) + ids
        for skip in (False, True):
            assert tokenizer.decode(ids, skip_special_tokens=skip) == source.decode(ids, skip_special_tokens=skip)
    assert config["add_bos_token"] == (pre in BEGINNING)


@pytest.mark.parametrize("pre", ["gpt-4o", "tekken"])
def test_words_are_split_by_case(pre: str, tmp_path: Path) -> None:
    """No vocabulary of these tokenizers is here: the parts into which they split text are compared."""
    document, _ = tokenizer_documents(write(tmp_path / "m.gguf", fill_from(trained(GPT2), pre)))
    pattern = document["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"]
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    parts = [part for part, _ in split.pre_tokenize_str("seeIT'll CamelCase 1234 a/b")]
    whole = ["see", "IT'll", " Camel", "Case", " ", "123", "4", " a", "/b"]
    assert parts == (whole if pre == "gpt-4o" else ["see", "IT", "'ll", " Camel", "Case", " ", *"1234", " a", "/b"])


def test_chinese_characters_are_split_from_other_letters(tmp_path: Path) -> None:
    document, _ = tokenizer_documents(write(tmp_path / "m.gguf", fill_from(trained(GPT2), "kimi-k2")))
    split = pre_tokenizers.Split(Regex(document["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"]), "isolated")
    parts = [part for part, _ in split.pre_tokenize_str("seeIT'll好的abc 1234")]
    assert parts == ["see", "IT'll", "好的", "abc", " ", "123", "4"]


def test_a_prompt_begins_and_ends_as_the_file_says(tmp_path: Path) -> None:
    source = trained(GPT2)

    def fill(writer: gguf.GGUFWriter) -> None:
        fill_from(source, "gpt-2")(writer)
        writer.add_eos_token_id(token_id(source, "<end>"))
        writer.add_add_bos_token(True)
        writer.add_add_eos_token(True)
        writer.add_chat_template("{{ messages }}")

    tokenizer, config = read(write(tmp_path / "m.gguf", fill))
    plain = source.encode("it's", add_special_tokens=False).ids
    assert tokenizer.encode("it's").ids == [source.token_to_id("<s>"), *plain, source.token_to_id("<end>")]
    assert config["chat_template"] == "{{ messages }}"


def test_named_templates_are_kept(tmp_path: Path) -> None:
    def fill(writer: gguf.GGUFWriter) -> None:
        fill_from(trained(GPT2), "gpt-2")(writer)
        templates = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
        writer.add_chat_template(templates)

    _, config = read(write(tmp_path / "m.gguf", fill))
    assert {item["name"]: item["template"] for item in config["chat_template"]} == {"default": "d", "tool_use": "t"}


# --- refusals ---------------------------------------------------------------------------------------------------------


def byte_level(**changes: Callable[[gguf.GGUFWriter], None]) -> Callable[[gguf.GGUFWriter], None]:
    parts: dict[str, Callable[[gguf.GGUFWriter], None]] = {
        "model": lambda writer: writer.add_tokenizer_model("gpt2"),
        "pre": lambda writer: writer.add_tokenizer_pre("gpt-2"),
        "tokens": lambda writer: writer.add_token_list(["a", "b", "ab"]),
        "types": lambda writer: writer.add_token_types([1, 1, 1]),
        "merges": lambda writer: writer.add_token_merges(["a b"]),
    }

    def fill(writer: gguf.GGUFWriter) -> None:
        for part in (parts | changes).values():
            part(writer)

    return fill


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model": lambda w: w.add_tokenizer_model("t5")},
            "of the kind t5 are not supported .*name that with --tokenizer",
        ),
        ({"pre": lambda w: w.add_tokenizer_pre("new-one")}, "pre is new-one: it is not known how"),
        ({"types": lambda w: w.add_token_types([1, 1])}, "there are 3 tokens and 2 types"),
        ({"tokens": lambda w: w.add_token_list(["a" * 5000, "b", "ab"])}, "a token of 5000 characters"),
        ({"merges": lambda w: w.add_token_merges(["ab"])}, "'ab' is not a merge of two tokens"),
        ({"more": lambda w: w.add_bos_token_id(3)}, "bos_token_id is 3, but there are 3 tokens"),
        ({"model": lambda w: w.add_tokenizer_model("llama")}, "field tokenizer.ggml.scores is missing"),
        ({"merges": lambda w: None}, "field tokenizer.ggml.merges is missing"),
    ],
)
def test_what_does_not_fit_is_refused(changes: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(GgufError, match=message):
        tokenizer_documents(write(tmp_path / "m.gguf", byte_level(**changes)))
