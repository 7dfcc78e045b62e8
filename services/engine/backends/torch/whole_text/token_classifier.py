"""Decoders whose result is the logits of some tokens at the last position, such as "yes" and "no" of Qwen3-Reranker.

Their checkpoint is that of a language model. Its config.json names the tokens in vLLM's fields: an architecture
`…ForSequenceClassification`, `classifier_from_token`, and `method` or `is_original_qwen3_reranker`. The rows of the
language model head for these tokens become a classification head. Called by `whole_text_model`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from transformers.modeling_layers import GenericForSequenceClassification

from antiphon.services.engine.models.config_fields import config_error

Method = Literal["from_2_way_softmax", "no_post_processing"]
TWO_WAY: Method = "from_2_way_softmax"
"""One number, the logit of the second token minus that of the first: its sigmoid is the probability of the second."""
PLAIN: Method = "no_post_processing"
"""One number for each token: its logit."""


@dataclass(frozen=True, slots=True)
class TokenHead:
    """The tokens of a classification head, and how its outputs are computed from their logits."""

    tokens: tuple[str, ...]
    method: Method

    @property
    def num_labels(self) -> int:
        """Number of outputs of the head."""
        return 1 if self.method == TWO_WAY else len(self.tokens)


def token_head(fields: Mapping[str, Any]) -> TokenHead | None:
    """Returns the head that a config.json describes; None if it describes none. Raises `ServiceError`."""
    original = bool(fields.get("is_original_qwen3_reranker"))
    method = fields.get("method") or (TWO_WAY if original else None)
    if method is None:
        return None
    if method not in (TWO_WAY, PLAIN):
        raise config_error(f"'method' is {method!r}; supported are {TWO_WAY} and {PLAIN}.")
    tokens = fields.get("classifier_from_token")
    listed = cast(list[Any], tokens) if isinstance(tokens, list) else []
    if not listed or not all(isinstance(token, str) for token in listed):
        raise config_error('\'classifier_from_token\' must be a list of tokens, such as ["no", "yes"].')
    if method == TWO_WAY and len(listed) != 2:
        raise config_error(f"'classifier_from_token' must have two tokens for {TWO_WAY}, the second of them the yes.")
    return TokenHead(tuple(listed), method)


def load_token_classifier(model_dir: Path, config: Any, head: TokenHead, dtype: torch.dtype, trusted: bool) -> Any:
    """Returns the language model in `model_dir` with `head` in place of its language model head. Raises `ServiceError`.

    `config`: the model's configuration, which gets the head's number of labels.
    """
    token_ids = _token_ids(model_dir, head, trusted)
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        model_dir, config=config, dtype=dtype, trust_remote_code=trusted, output_loading_info=True
    )
    causal, info = cast(tuple[Any, dict[str, Any]], loaded)
    if lacks := sorted(info["missing_keys"]):
        raise config_error(f"its checkpoint lacks {', '.join(lacks[:5])}.")
    config.num_labels = head.num_labels
    # The head must use the last token in any case; with a padding token it would search for the last token that is
    # another one.
    config.pad_token_id = None
    with torch.device("meta"):  # its parameters are replaced by those of the language model
        model: Any = AutoModelForSequenceClassification.from_config(config, trust_remote_code=trusted)
    if not isinstance(model, GenericForSequenceClassification):
        raise config_error(f"a head of tokens on a model of type {config.model_type!r} is not supported.")
    rows = causal.get_output_embeddings().weight.detach()[token_ids].to(torch.float32)
    weight = rows[1:] - rows[:1] if head.method == TWO_WAY else rows
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = torch.nn.Parameter(weight.to(dtype), requires_grad=False)
    model.score = linear
    setattr(model, model.base_model_prefix, causal.base_model)
    return model


def _token_ids(model_dir: Path, head: TokenHead, trusted: bool) -> list[int]:
    vocabulary: dict[str, int] = AutoTokenizer.from_pretrained(model_dir, trust_remote_code=trusted).get_vocab()
    unknown = [token for token in head.tokens if token not in vocabulary]
    if unknown:
        raise config_error(f"'classifier_from_token' has {unknown[0]!r}, which is no token of the model's tokenizer.")
    return [vocabulary[token] for token in head.tokens]
