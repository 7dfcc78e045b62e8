"""Qwen2-VL and Qwen2.5-VL: Qwen2 with positions in time, row and column, beside a vision encoder of its own.

The vision encoder is not a part of the decoder: `services/vision` runs it, and its weights are skipped here.
"""

from dataclasses import replace

from antiphon.services.engine.models.config_fields import Config, config_error
from antiphon.services.engine.models.description import DecoderDescription
from antiphon.services.engine.models.families import qwen2
from antiphon.services.engine.models.layout import llama_layout

ARCHITECTURES = ("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration")
layout = llama_layout
_AXES = 3


def describe(config: Config) -> DecoderDescription:
    """Returns the description. Newer configs have the decoder's fields in `text_config`, older ones beside the rest."""
    fields = {**config, **(config.get("text_config") or {})}
    for name in ("tie_word_embeddings", "dtype", "torch_dtype"):
        if config.get(name) is not None:
            fields[name] = config[name]
    scaling = {**(fields.get("rope_scaling") or {}), **(fields.get("rope_parameters") or {})}
    sections = tuple(scaling.pop("mrope_section", ()))
    if scaling.get("type") == "mrope":
        scaling["type"] = "default"
    if scaling.get("rope_type") == "mrope":
        scaling["rope_type"] = "default"
    fields["rope_scaling"], fields["rope_parameters"] = scaling, {}
    description = qwen2.describe(fields)
    assert description.rope is not None
    if len(sections) != _AXES or sum(sections) != description.rope.rotary_dim // 2:
        raise config_error(f"'mrope_section' must divide the {description.rope.rotary_dim // 2} frequencies in three.")
    rope = replace(description.rope, sections=sections)
    return replace(description, family="qwen2_vl", rope=rope, other_parts=("visual.",))
