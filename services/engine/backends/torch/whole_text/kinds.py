"""Which models compute all tokens of a text in one step, as encoders do; groups their texts into batches. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from antiphon.services.engine.models.about import About

CLASSIFIER = "ForSequenceClassification"
ENCODERS = {
    "albert": About(models="ALBERT"),
    "bert": About(models="BERT"),
    "camembert": About(models="CamemBERT"),
    "deberta-v2": About(models="DeBERTa 2 and 3"),
    "distilbert": About(models="DistilBERT"),
    "electra": About(models="ELECTRA"),
    "modernbert": About(models="ModernBERT"),
    "mpnet": About(models="MPNet"),
    "nomic_bert": About(models="Nomic BERT"),
    "roberta": About(models="RoBERTa"),
    "xlm-roberta": About(models="XLM-RoBERTa"),
}
"""Model types (config.json) of supported encoders."""
CLASSIFIERS = About(models="encoders and decoders with a classification head")
BATCHED = True
"""Whether texts are computed together, as far as their lengths allow (`batches`)."""
COMPUTES_WHOLE = True
"""See `EngineFacts.computes_whole`."""
PADDING_SHARE = 0.25
"""Maximum share of padding among the tokens of a batch."""


def computes_whole(config: Mapping[str, Any]) -> bool:
    """Whether the model of a config.json is one of `whole_text_model`: an encoder, or one that classifies texts."""
    return classifies(config) or config.get("model_type") in ENCODERS


def classifies(config: Mapping[str, Any]) -> bool:
    """Whether the model of a config.json has a classification head for whole texts."""
    return any(str(name).endswith(CLASSIFIER) for name in config.get("architectures") or [])


def batches(lengths: Sequence[int]) -> list[list[int]]:
    """Returns the indices of texts in batches, the longest first; each has at most `PADDING_SHARE` of padding.

    `lengths`: number of tokens of each text, all above 0.
    """
    found: list[list[int]] = []
    longest = total = 0
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        length = lengths[index]
        if found and total + length >= (1 - PADDING_SHARE) * longest * (len(found[-1]) + 1):
            found[-1].append(index)
            total += length
        else:
            found.append([index])
            longest = total = length
    return found
