"""Makes tokenizer.json and tokenizer_config.json from the metadata of a GGUF file.

    gpt2    bytes merged by rank, the tokenizers of Llama 3, Qwen, GPT-2 …
    llama   SentencePiece: characters merged by the score of the result, bytes for characters without a token
    gemma4  characters merged by rank, bytes for characters without a token

Called by `directory`.
"""

from typing import Any

from antiphon.shared.models.gguf_model.reader import GgufModel
from antiphon.shared.models.gguf_model.splitting import NAMES, Splitting, find_splitting

_PREFIX = "tokenizer.ggml."
_TEMPLATE = "tokenizer.chat_template"
_USER_DEFINED = 4
_ADDED = (2, 3, _USER_DEFINED)
"""Types of tokens that are found in a text before it is split: unknown, control, user defined."""
_TOKEN_CHARS_MAX = 2048
_SPACE = "▁"
_NAMES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
Document = dict[str, Any]


def tokenizer_documents(model: GgufModel) -> tuple[Document, Document]:
    """Returns the contents of tokenizer.json and of tokenizer_config.json.

    Raises GgufError for a kind of tokenizer that is not supported, and for contradictions.
    """
    kind = model.string(f"{_PREFIX}model")
    if kind not in _KINDS:
        raise model.fail(
            f"tokenizers of the kind {kind} are not supported in GGUF files ({', '.join(_KINDS)} are): put the file "
            "into a directory with the model's tokenizer.json, or name that with --tokenizer"
        )
    tokens = model.strings(f"{_PREFIX}tokens")
    types = model.integers(f"{_PREFIX}token_type") if model.has(f"{_PREFIX}token_type") else [1] * len(tokens)
    if len(types) != len(tokens) or not tokens:
        raise model.fail(f"there are {len(tokens)} tokens and {len(types)} types of tokens")
    longest = max(map(len, tokens))
    if longest > _TOKEN_CHARS_MAX:
        raise model.fail(f"a token of {longest} characters")
    document, begins = _KINDS[kind](model, tokens)
    named = _named_tokens(model, tokens)
    begins = model.boolean(f"{_PREFIX}add_bos_token", begins)
    ends = model.boolean(f"{_PREFIX}add_eos_token", False)
    around = _post_processor(tokens, named.get("bos_token") if begins else "", named.get("eos_token") if ends else "")
    added = [_added(index, tokens[index], kind) for index, kind in enumerate(types) if kind in _ADDED]
    head: Document = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added}
    document = {**head, "post_processor": None, **document, **({"post_processor": around} if around else {})}
    return document, _config(model, named, begins, ends)


def _byte_level(model: GgufModel, tokens: list[str]) -> tuple[Document, bool]:
    name = model.string(f"{_PREFIX}pre", "default")
    splitting = find_splitting(name, model.architecture)
    if splitting is None:
        raise model.fail(
            f"{_PREFIX}pre is {name}: it is not known how that tokenizer splits text (known: {', '.join(NAMES)}). Put "
            "the file into a directory with the model's tokenizer.json, or name that with --tokenizer"
        )
    return _byte_level_document(_vocabulary(tokens), _listed_merges(model), splitting), splitting.begins


def _listed_merges(model: GgufModel) -> list[list[str]]:
    merges: list[list[str]] = []
    for merge in model.strings(f"{_PREFIX}merges"):
        left, _, right = merge.partition(" ")
        if not left or not right:
            raise model.fail(f"{merge[:40]!r} is not a merge of two tokens")
        merges.append([left, right])
    return merges


def _byte_level_document(vocabulary: dict[str, int], merges: list[list[str]], splitting: Splitting) -> Document:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "normalizer": {"type": "NFC"} if splitting.composes else None,
        "pre_tokenizer": splitting.pre_tokenizer(),
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": _bpe(_known(merges, vocabulary), vocabulary, ignore_merges=splitting.whole_words),
    }


def _sentence_piece(model: GgufModel, tokens: list[str]) -> tuple[Document, bool]:
    scores = model.numbers(f"{_PREFIX}scores")
    if len(scores) != len(tokens):
        raise model.fail(f"there are {len(tokens)} tokens and {len(scores)} scores")
    vocabulary = _vocabulary(tokens)
    return _by_characters(model, tokens, vocabulary, _merges_by_score(vocabulary, scores), True), True


def _gemma4(model: GgufModel, tokens: list[str]) -> tuple[Document, bool]:
    vocabulary = _vocabulary(tokens)
    return _by_characters(model, tokens, vocabulary, _known(_listed_merges(model), vocabulary), False), True


def _by_characters(
    model: GgufModel, tokens: list[str], vocabulary: dict[str, int], merges: list[list[str]], prefix: bool
) -> Document:
    """Returns the tokenizer that merges characters. `prefix`: whether a text begins with a space by default."""
    unknown = model.optional_integer(f"{_PREFIX}unknown_token_id")
    prefix = model.boolean(f"{_PREFIX}add_space_prefix", prefix)
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    first = [{"type": "Prepend", "prepend": _SPACE}] if prefix else []
    last = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    back = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    unknown_text = None if unknown is None else _token(model, tokens, "unknown", unknown)
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*first, spaces]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *last]},
        "model": _bpe(merges, vocabulary, unk_token=unknown_text, fuse_unk=True, byte_fallback=True),
    }


def _known(merges: list[list[str]], vocabulary: dict[str, int]) -> list[list[str]]:
    return [[left, right] for left, right in merges if {left, right, left + right} <= vocabulary.keys()]


def _merges_by_score(vocabulary: dict[str, int], scores: list[float]) -> list[list[str]]:
    """Returns all pairs of tokens that make up a token, those with the highest score of the result first.

    SentencePiece merges in this order; it has no list of merges.
    """
    found: list[tuple[float, int, int, str, str]] = []
    for text, index in vocabulary.items():
        for end in range(1, len(text)):
            left, right = text[:end], text[end:]
            if left in vocabulary and right in vocabulary:
                found.append((-scores[index], vocabulary[left], vocabulary[right], left, right))
    found.sort(key=lambda merge: merge[:3])
    return [[left, right] for *_, left, right in found]


def _bpe(merges: list[list[str]], vocabulary: dict[str, int], **options: Any) -> Document:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        **options,
        "vocab": vocabulary,
        "merges": merges,
    }


def _vocabulary(tokens: list[str]) -> dict[str, int]:
    """Returns the id of each text; if a text occurs several times, as padding does, the first id."""
    vocabulary: dict[str, int] = {}
    for index, text in enumerate(tokens):
        vocabulary.setdefault(text, index)
    return vocabulary


def _added(index: int, text: str, kind: int) -> Document:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": index, "content": text, **flags, "special": kind != _USER_DEFINED}


def _post_processor(tokens: list[str], first: str | None, last: str | None) -> Document | None:
    """Returns the post-processor that adds tokens before and after a prompt; None if there are none."""
    if not first and not last:
        return None
    begin, end = ([{"SpecialToken": {"id": text, "type_id": 0}}] if text else [] for text in (first, last))
    one, two = ([{"Sequence": {"id": name, "type_id": number}}] for number, name in enumerate("AB"))
    return {
        "type": "TemplateProcessing",
        "single": [*begin, *one, *end],
        "pair": [*begin, *one, *end, *begin, *two, *end],
        "special_tokens": {
            text: {"id": text, "ids": [tokens.index(text)], "tokens": [text]} for text in (first, last) if text
        },
    }


def _named_tokens(model: GgufModel, tokens: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for theirs, ours in _NAMES.items():
        index = model.optional_integer(f"{_PREFIX}{theirs}_token_id")
        if index is not None:
            found[ours] = _token(model, tokens, theirs, index)
    return found


def _token(model: GgufModel, tokens: list[str], name: str, index: int) -> str:
    if not 0 <= index < len(tokens):
        raise model.fail(f"{_PREFIX}{name}_token_id is {index}, but there are {len(tokens)} tokens")
    return tokens[index]


def _config(model: GgufModel, named: dict[str, str], begins: bool, ends: bool) -> Document:
    config: Document = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **named,
        "add_bos_token": begins,
        "add_eos_token": ends,
        "clean_up_tokenization_spaces": False,
        "model_max_length": model.optional_integer(f"{model.architecture}.context_length"),
    }
    templates = {"default": model.string(_TEMPLATE)} if model.has(_TEMPLATE) else {}
    for name in model.strings(f"{_TEMPLATE}s") if model.has(f"{_TEMPLATE}s") else ():
        templates[name] = model.string(f"{_TEMPLATE}.{name}")
    if list(templates) == ["default"]:
        return config | {"chat_template": templates["default"]}
    named_templates = [{"name": name, "template": text} for name, text in templates.items()]
    return config | ({"chat_template": named_templates} if named_templates else {})


_KINDS = {"gpt2": _byte_level, "llama": _sentence_piece, "gemma4": _gemma4}
