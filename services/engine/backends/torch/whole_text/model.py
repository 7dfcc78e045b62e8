"""Models of transformers that compute a text in one step: encoders, and models with a classification head.

In an encoder (such as BERT) each token attends to later tokens, so there is no KV cache and no generation. A decoder
with a classification head (`LlamaForSequenceClassification`) is run in the same way, because its result needs only one
pass over the text. Texts of about the same length are computed together, with padding at the end. Raises `ServiceError`
for a model that cannot be run. Called by `whole_text_worker`; importing transformers takes seconds.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification
from transformers.modeling_layers import GenericForSequenceClassification

from antiphon.services.engine.backends.torch.whole_text.kinds import ENCODERS, classifies
from antiphon.services.engine.backends.torch.whole_text.token_classifier import load_token_classifier, token_head
from antiphon.services.engine.models.config_fields import config_error
from antiphon.services.engine.worker.loading.model_files import read_json
from antiphon.shared.errors import ServiceError

Activation = Literal["identity", "sigmoid", "softmax"]
_ACTIVATIONS: dict[str, Activation] = {"Identity": "identity", "Sigmoid": "sigmoid", "Softmax": "softmax"}
_OF_PROBLEM: dict[str, Activation] = {
    "regression": "identity",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
}
_POSITIONS_AFTER_PADDING = {"camembert", "mpnet", "roberta", "xlm-roberta"}
"""Model types whose first position is the padding token's id plus one."""
_UNUSED = "pooler."
"""Parameters of BERT's pooler, which embeddings do not use and many checkpoints lack."""


@dataclass(frozen=True, slots=True)
class Text:
    """The tokens of a text, or of a pair of texts of which the first has `num_first` tokens (0: a single text)."""

    token_ids: tuple[int, ...]
    num_first: int = 0


class WholeTextModel:
    """A loaded model. `labels` are those of its classification head; empty: the model returns hidden states."""

    def __init__(self, model: Any, config: Any, device: torch.device, max_positions: int) -> None:
        self.module: torch.nn.Module = model
        self.max_positions = max_positions
        self.vocab_size: int = config.vocab_size
        self.hidden_size: int = config.hidden_size
        self.labels: tuple[str, ...] = ()
        self.activation: Activation = "identity"
        if _is_classifier(model):
            self.labels = tuple(str(config.id2label[index]) for index in range(config.num_labels))
            self.activation = _activation(config)
        self._model, self._device = model, device
        self._padding: int | None = config.pad_token_id
        names = inspect.signature(model.forward).parameters
        numbered = int(getattr(config, "type_vocab_size", 0) or 0) > 1
        self._numbers_texts = numbered and "token_type_ids" in names
        """Whether the model has token type ids, which tell the two texts of a pair apart."""
        # A decoder's head finds the last token of each text in a batch by the padding token, so batches need one.
        self.takes_batches = self._padding is not None or not self.labels

    def logits(self, texts: Sequence[Text], *, activate: Sequence[bool]) -> Tensor:
        """Returns the outputs of the classification head, [texts, labels] float32.

        `activate`: for each text, whether to apply the model's activation function.
        """
        raw: Tensor = self._model(**self._inputs(texts)).logits.to(torch.float32)
        active = _activated(raw, self.activation)
        chosen = torch.tensor(list(activate), device=raw.device).unsqueeze(1)
        return torch.where(chosen, active, raw)

    def hidden_states(self, texts: Sequence[Text]) -> Tensor:
        """Returns the last hidden states [texts, tokens of the longest, hidden]; undefined after a text's end."""
        return self._model(**self._inputs(texts)).last_hidden_state

    def _inputs(self, texts: Sequence[Text]) -> dict[str, Any]:
        longest = max(len(text.token_ids) for text in texts)
        ids = torch.full((len(texts), longest), self._padding or 0, dtype=torch.int64)
        mask, second = torch.zeros_like(ids), torch.zeros_like(ids)
        for row, text in enumerate(texts):
            length = len(text.token_ids)
            ids[row, :length] = torch.tensor(text.token_ids)
            mask[row, :length] = 1
            if text.num_first:
                second[row, text.num_first : length] = 1
        inputs = {"input_ids": ids.to(self._device)}
        if not bool(mask.all()):
            inputs["attention_mask"] = mask.to(self._device)
        if self._numbers_texts:
            inputs["token_type_ids"] = second.to(self._device)
        return inputs


def load_whole_text_model(
    model_dir: Path,
    config: Mapping[str, Any],
    dtype: torch.dtype,
    device: torch.device,
    trust_remote_code: bool = False,
) -> WholeTextModel:
    """Returns the model, loaded on the device. `config`: the content of its config.json. Raises `ServiceError`."""
    names = ", ".join(map(str, config.get("architectures") or [])) or "none at all"
    try:
        return _load(model_dir, config, dtype, device, trust_remote_code)
    except ServiceError:
        raise
    except Exception as error:  # exceptions of foreign modelling code have no common base class
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
        raise config_error(f"architecture {names} does not run through transformers: {reason}") from error


def _load(
    model_dir: Path, fields: Mapping[str, Any], dtype: torch.dtype, device: torch.device, trusted: bool
) -> WholeTextModel:
    config: Any = AutoConfig.from_pretrained(model_dir, trust_remote_code=trusted)
    if getattr(config, "is_decoder", False) and config.model_type in ENCODERS:
        raise config_error("an encoder that is used as a decoder ('is_decoder') is not supported.")
    head = token_head(fields) if classifies(fields) else None
    if head is not None:
        model = load_token_classifier(model_dir, config, head, dtype, trusted)
        return WholeTextModel(model.to(device).eval(), config, device, max_positions(model_dir, config))
    loader: Any = AutoModelForSequenceClassification if classifies(fields) else AutoModel
    loaded: Any = loader.from_pretrained(
        model_dir, config=config, dtype=dtype, trust_remote_code=trusted, output_loading_info=True
    )
    model, info = cast(tuple[Any, dict[str, Any]], loaded)
    kind: type = type(model)
    lacks = sorted(name for name in info["missing_keys"] if classifies(fields) or not name.startswith(_UNUSED))
    if lacks:
        raise config_error(f"its checkpoint lacks {', '.join(lacks[:5])}.")
    if config.model_type not in ENCODERS and not issubclass(kind, GenericForSequenceClassification):
        raise config_error(
            f"a classification head on a model of type {config.model_type!r} is not supported. Supported are decoders "
            f"and {', '.join(sorted(ENCODERS))}."
        )
    text_config = config.get_text_config()
    return WholeTextModel(model.to(device).eval(), text_config, device, max_positions(model_dir, text_config))


def max_positions(model_dir: Path, config: Any) -> int:
    """Returns the length of the longest text in tokens, special tokens included.

    sentence-transformers may set a lower limit than the model's positions allow (`sentence_bert_config.json`).
    """
    positions = int(config.max_position_embeddings)
    if config.model_type in _POSITIONS_AFTER_PADDING:
        positions -= config.pad_token_id + 1
    stated = read_json(model_dir / "sentence_bert_config.json").get("max_seq_length")
    return min(positions, stated) if isinstance(stated, int) and stated > 0 else positions


def _is_classifier(model: Any) -> bool:
    return type(model).__name__.endswith("ForSequenceClassification")


def _activation(config: Any) -> Activation:
    """Returns the activation function that the model's files name; else sigmoid for one label, softmax for several."""
    stated = (getattr(config, "sentence_transformers", None) or {}).get("activation_fn")
    stated = stated or getattr(config, "sbert_ce_default_activation_function", None)
    if stated:
        name = str(stated).rpartition(".")[2]
        if name not in _ACTIVATIONS:
            known = ", ".join(_ACTIVATIONS)
            raise config_error(f"the activation {stated!r} of the classification head is not supported; {known} are.")
        return _ACTIVATIONS[name]
    if config.problem_type:
        return _OF_PROBLEM[config.problem_type]
    return "sigmoid" if config.num_labels == 1 else "softmax"


def _activated(logits: Tensor, activation: Activation) -> Tensor:
    if activation == "sigmoid":
        return logits.sigmoid()
    return logits.softmax(-1) if activation == "softmax" else logits
