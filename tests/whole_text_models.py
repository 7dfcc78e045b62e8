"""Small random encoders and classifiers for tests: model directories as the field writes them, with a tokenizer."""

import json
import string
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import WordPiece

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_WORDS = ("the", "cat", "sat", "on", "mat", "dog", "a", "in", "fog", "kitten", "stone", "pets", "##s", "##ing")
_CHARS = [*string.ascii_lowercase, *string.digits, *".,?!"]
VOCAB = {
    word: index
    for index, word in enumerate(
        dict.fromkeys((*SPECIAL, *_WORDS, *_CHARS, *(f"##{char}" for char in string.ascii_lowercase + string.digits)))
    )
}
VOCAB_SIZE = len(VOCAB)
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 130,
}
ENCODERS: dict[str, dict[str, Any]] = {
    "albert": {"pad_token_id": 0, "embedding_size": 16},
    "bert": {},
    "camembert": {"pad_token_id": 1},
    "deberta-v2": {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "type_vocab_size": 0},
    "distilbert": {"dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4},
    "electra": {"embedding_size": 16},
    "modernbert": {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3},
    "mpnet": {"pad_token_id": 1},
    "nomic_bert": {},
    "roberta": {"pad_token_id": 1, "type_vocab_size": 1},
    "xlm-roberta": {"pad_token_id": 1, "type_vocab_size": 1},
}
DECODERS: dict[str, dict[str, Any]] = {
    "llama": {"pad_token_id": 0},
    "qwen3": {"head_dim": 8, "num_key_value_heads": 2, "pad_token_id": None},
}
"""Decoders that get a classification head."""


def write_encoder(directory: Path, model_type: str, num_labels: int = 0, **config: Any) -> Path:
    """An encoder, or with `num_labels` a model with a classification head. Its norms and biases are random too."""
    from transformers import CONFIG_MAPPING, AutoModel, AutoModelForSequenceClassification

    shape = dict(_SHAPE)
    if model_type == "distilbert":
        shape = {name: shape[name] for name in ("vocab_size", "max_position_embeddings")}
    given = {**shape, **ENCODERS.get(model_type, {}), **DECODERS.get(model_type, {}), **config}
    if num_labels:
        given |= {"num_labels": num_labels}
    made: Any = CONFIG_MAPPING[model_type](**given)
    torch.manual_seed(0)
    model: Any = (AutoModelForSequenceClassification if num_labels else AutoModel).from_config(made)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(directory)
    write_wordpiece(directory)
    return directory


def write_token_classifier(directory: Path, model_type: str, fields: dict[str, Any], **config: Any) -> Path:
    """A language model whose config.json has `fields` beside its own, such as those of Qwen3-Reranker."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    torch.manual_seed(0)
    made: Any = CONFIG_MAPPING[model_type](**{**_SHAPE, **DECODERS[model_type], **config})
    model: Any = AutoModelForCausalLM.from_config(made)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(directory)
    path = directory / "config.json"
    own = json.loads(path.read_text())
    head = {"architectures": [own["architectures"][0].replace("ForCausalLM", "ForSequenceClassification")]}
    path.write_text(json.dumps(own | head | fields))
    write_wordpiece(directory)
    return directory


def write_sentence_files(directory: Path, pooling: dict[str, Any], max_seq_length: int | None = None) -> None:
    """Adds the files of sentence-transformers: its modules, how it pools, and the longest text."""
    names = ("Transformer", "Pooling", "Normalize")
    modules = [{"idx": i, "type": f"sentence_transformers.models.{name}"} for i, name in enumerate(names)]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 32, **pooling}))
    if max_seq_length is not None:
        (directory / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": max_seq_length}))


def write_wordpiece(directory: Path) -> None:
    """A tokenizer like BERT's, uncased."""
    tokenizer: Any = Tokenizer(WordPiece(VOCAB, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", VOCAB["[CLS]"]), ("[SEP]", VOCAB["[SEP]"])],
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    named = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    (directory / "tokenizer_config.json").write_text(json.dumps(named | {"tokenizer_class": "BertTokenizerFast"}))
