"""How byte-level tokenizers split text before they merge bytes, by the name in `tokenizer.ggml.pre`.

The patterns are those of the tokenizers' own files, which llama.cpp repeats (src/llama-vocab.cpp) and recognises by
these names. Called by `tokenizer`.
"""

from dataclasses import dataclass
from typing import Any

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"


def _gpt4(digits: str, marks: str = "") -> str:
    letters = rf"[\p{{L}}{marks}]" if marks else r"\p{L}"
    return rf"{_CONTRACTIONS}|{_BEFORE}{letters}+|{digits}| ?[^\s\p{{L}}{marks}\p{{N}}]+[\r\n]*|{_SPACES}"


def _words(upper: str, lower: str, end: str) -> str:
    return rf"{_BEFORE}{upper}*{lower}+{end}|{_BEFORE}{upper}+{lower}*{end}"


def _kimi() -> str:
    """Returns the pattern of Kimi K2, which splits Chinese characters from other letters."""
    upper, lower = (rf"[{letters[1:-1]}&&[^\p{{Han}}]]" for letters in (_UPPER, _LOWER))
    words = _words(upper, lower, f"{_CONTRACTIONS}?")
    return rf"[\p{{Han}}]+|{words}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"


def _by_case(end: str, digits: str) -> str:
    words = _words(_UPPER, _LOWER, end)
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Splitting:
    """The pre-tokenization before merges. Without a pattern, text is split like in GPT-2."""

    pattern: str = ""
    single_digits: bool = False
    """Whether digits are split off one by one before GPT-2's pattern."""
    composes: bool = False
    """Whether text is brought to Unicode's composed form (NFC)."""
    whole_words: bool = False
    """Whether a part that is itself a token becomes that token, regardless of merges."""
    begins: bool = False
    """Whether prompts begin with the begin-of-sequence token if the file does not say whether they do."""

    def pre_tokenizer(self) -> dict[str, Any]:
        """Returns the `pre_tokenizer` of tokenizer.json."""
        rest = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
        if self.pattern:
            split = {"type": "Split", "pattern": {"Regex": self.pattern}, "behavior": "Isolated", "invert": False}
            return {"type": "Sequence", "pretokenizers": [split, {**rest, "use_regex": False}]}
        first = [{"type": "Digits", "individual_digits": True}] if self.single_digits else []
        return {"type": "Sequence", "pretokenizers": [*first, {**rest, "use_regex": True}]}


_GPT2 = Splitting()
_LLAMA3 = Splitting(pattern=_gpt4(r"\p{N}{1,3}"), whole_words=True, begins=True)
_QWEN2 = Splitting(pattern=_gpt4(r"\p{N}"), composes=True)
_QWEN3_5 = Splitting(pattern=_gpt4(r"\p{N}", r"\p{M}"), composes=True)
_DIGITS = Splitting(single_digits=True)
_GPT4O = Splitting(pattern=_by_case(f"{_CONTRACTIONS}?", r"\p{N}{1,3}"))
_TEKKEN = Splitting(pattern=_by_case("", r"\p{N}"), whole_words=True, begins=True)
_BY_NAME: dict[str, Splitting] = {
    **dict.fromkeys(("gpt-2", "phi-2", "jina-es", "jina-de", "gigachat", "roberta-bpe", "mpt", "olmo", "jais"), _GPT2),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe"), Splitting(pattern=_LLAMA3.pattern)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan"), _QWEN2),
    **dict.fromkeys(("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone"), _DIGITS),
    **dict.fromkeys(("gpt-4o", "llama4"), _GPT4O),
    "tekken": _TEKKEN,
    "qwen35": _QWEN3_5,
    "kimi-k2": Splitting(pattern=_kimi()),
}
_BY_ARCHITECTURE = {
    **dict.fromkeys(("qwen2", "qwen3", "qwen2moe", "qwen3moe", "qwen3next"), _QWEN2),
    **dict.fromkeys(("qwen35", "qwen35moe"), _QWEN3_5),
    **dict.fromkeys(("lfm2", "lfm2moe"), _LLAMA3),
}
"""For files from before `tokenizer.ggml.pre` was introduced."""
NAMES = tuple(sorted(_BY_NAME))


def find_splitting(name: str, architecture: str) -> Splitting | None:
    """Returns the splitting with a name, None if it is unknown.

    `default` means the splitting of the architecture's models.
    """
    if name in ("", "default"):
        return _BY_ARCHITECTURE.get(architecture, _GPT2)
    return _BY_NAME.get(name)
