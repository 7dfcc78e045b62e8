"""Small real tokenizers for tests, one for each way that models spell text, trained on a few sentences."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

SPECIAL_TOKENS = ("<|end|>", "<s>")
SENTENCES = (
    "The engine sings and the gateway answers, one voice after the other.",
    "  Two leading spaces, a tab\tand a line\nbreak; then 12345 numbers.",
    "Zażółć gęślą jaźń, déjà vu, naïve café, Ünïcödé straße.",
    "Быстрая лиса прыгает. 好的，我们开始吧。日本語のテキスト。",
)
HARD_TEXTS = (
    *SENTENCES,
    "",
    " ",
    "👍🏽 👩‍👩‍👧‍👦 🇩🇪 emoji of several characters 🧵🪡",
    "e\u0301 a\u030a combining; \u200b zero width; \ufeff mark; हिन्दी; العربية",
    "half <|end|> a special, <0x41> a byte token as text, ▁ a mark",
    "\x00\x01 control \x7f and \ufffd itself, 𝒳 𝔘 outside the basic plane",
)


def byte_level() -> Tokenizer:
    """As GPT-2, Llama 3 and Qwen: every byte has a token, characters may be split anywhere."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _trained(tokenizer, pre_tokenizers.ByteLevel.alphabet())


def byte_fallback(strip: bool = True) -> Tokenizer:
    """As Llama 2 and Mistral (`strip`) or Gemma: spaces are ▁, and a character without a token is spelled in bytes."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")] if strip else [normalizers.Replace(" ", "▁")]
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    return _trained(tokenizer, [], ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))], 420, limit=60)


def metaspace(prepend: str = "always") -> Tokenizer:
    """As T5 and early SentencePiece conversions: ▁ for spaces, no bytes."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=prepend)
    return _trained(tokenizer, [], ["<unk>"])


def suffixed() -> Tokenizer:
    """As CLIP: a word ends in a mark that becomes a space, so a token's text depends on its neighbours."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.BPEDecoder("</w>")
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", *SPECIAL_TOKENS], end_of_word_suffix="</w>")
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return tokenizer


TOKENIZERS = {
    "byte level": byte_level,
    "byte fallback": byte_fallback,
    "byte fallback, no strip": lambda: byte_fallback(strip=False),
    "metaspace": metaspace,
    "metaspace, first": lambda: metaspace("first"),
    "metaspace, never": lambda: metaspace("never"),
    "suffixed": suffixed,
}


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a token that the vocabulary has."""
    found = tokenizer.token_to_id(token)
    assert found is not None, token
    return found


def decoder_of(tokenizer: Tokenizer) -> dict[str, Any] | None:
    """The description of the decoder, as in the tokenizer's file."""
    return json.loads(tokenizer.to_str())["decoder"]


def write_tokenizer_files(directory: Path, tokenizer: Tokenizer, **config: Any) -> Path:
    """A directory with `tokenizer.json` and `tokenizer_config.json`; gives it back."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    facts = {"bos_token": "<s>", "eos_token": {"content": "<|end|>", "special": True}, **config}
    (directory / "tokenizer_config.json").write_text(json.dumps(facts))
    return directory


def _trained(
    tokenizer: Tokenizer, alphabet: list[str], first: list[str] | None = None, size: int = 400, limit: int | None = None
) -> Tokenizer:
    most: dict[str, Any] = {"limit_alphabet": limit} if limit else {}
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=first or [], initial_alphabet=alphabet, show_progress=False,
        **most,
    )  # fmt: skip
    tokenizer.train_from_iterator(SENTENCES, trainer)
    data = json.loads(tokenizer.to_str())
    data["added_tokens"] = []  # what the trainer was given first (bytes, unknown) is plain vocabulary
    tokenizer = Tokenizer.from_str(json.dumps(data))
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken("<tool é>", normalized=False)])
    return tokenizer
