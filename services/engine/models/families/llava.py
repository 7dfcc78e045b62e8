"""LLaVA 1.5 and LLaVA-NeXT: a decoder of another family, beside a vision encoder and its projection.

The encoder is not a part of the decoder: `services/vision` runs it, and its weights are skipped here. The tokens of a
image have ordinary positions.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from antiphon.services.engine.models.config_fields import Config, config_error
from antiphon.services.engine.models.description import DecoderDescription
from antiphon.services.engine.models.families import llama, mistral, qwen2
from antiphon.services.engine.models.layout import Names, named_layout

ARCHITECTURES = ("LlavaForConditionalGeneration", "LlavaNextForConditionalGeneration")
_HEAD = "language_model.lm_head"
layout = named_layout(
    Names(
        embedding="language_model.model.embed_tokens",
        final_norm="language_model.model.norm",
        head=_HEAD,
        layer="language_model.model.layers.{}",
    )
)


_FAMILIES: dict[str, tuple[Callable[[Config], DecoderDescription], dict[str, Any]]] = {
    "llama": (llama.describe, {"intermediate_size": 11008, "vocab_size": 32000}),
    "mistral": (
        mistral.describe,
        {
            "intermediate_size": 14336,
            "vocab_size": 32000,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
        },
    ),
    "qwen2": (qwen2.describe, {"intermediate_size": 22016, "vocab_size": 151936, "max_position_embeddings": 32768}),
}
"""Each kind of decoder with transformers' default values for fields that are missing in a `text_config`."""
_USUAL = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}


def describe(config: Config) -> DecoderDescription:
    """Returns the description of the decoder in `text_config`."""
    text: dict[str, Any] = dict(config.get("text_config") or {})
    kind = text.get("model_type") or "llama"
    if kind not in _FAMILIES:
        raise config_error(f"a decoder of type {kind!r} is not served with images; served: {', '.join(_FAMILIES)}.")
    describe_text, defaults = _FAMILIES[kind]
    fields = {**_USUAL, **defaults, **text}
    for name in ("dtype", "torch_dtype"):
        fields[name] = config.get(name) or text.get(name)
    fields["tie_word_embeddings"] = bool(config.get("tie_word_embeddings") or text.get("tie_word_embeddings"))
    others = ("vision_tower.", "multi_modal_projector.", "image_newline")
    description = describe_text(fields)
    tied = (f"{_HEAD}.weight",) if description.tied_embeddings else ()
    return replace(description, family="llava", other_parts=(*others, *tied))
