"""Qwen 3.5 and Qwen3-Next, dense and with experts: most layers have a gated delta rule in place of attention.

Attention has norms per head, a gate on its output and rotates a part of each head. Every layer of the kind with experts
has them, and a shared expert with a gate.
"""

from typing import Any

from antiphon.services.engine.models.about import About
from antiphon.services.engine.models.config_fields import (
    Config,
    boolean,
    config_error,
    integer,
    llama_like,
    number,
)
from antiphon.services.engine.models.description import DecoderDescription, Experts
from antiphon.services.engine.models.layout import DraftNames, Names, Parameter, named_layout
from antiphon.services.engine.models.recurrent_kinds import GatedDelta

_NEXT = "Qwen3NextForCausalLM"
ARCHITECTURES = ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM", _NEXT)
_MTP = "`--use-mtp`: C++ and PyTorch"
_QWEN3_5 = About(models="Qwen 3.5 to 3.8, also with experts", tools=("qwen3_coder",), reasoning=("qwen3",), limits=_MTP)
ABOUT = {
    **dict.fromkeys(ARCHITECTURES, _QWEN3_5),
    _NEXT: About(models="Qwen3-Next", tools=("hermes",), reasoning=("qwen3",), limits=_MTP),
}
_DELTA: dict[str, Any] = {
    "mix_in": ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"),
    "mix_gate": ("linear_attn.in_proj_b", "linear_attn.in_proj_a"),
    "mix_out": "linear_attn.out_proj",
    "conv": "linear_attn.conv1d",
    "mix_norm": "linear_attn.norm",
    "decay": "linear_attn.A_log",
    "decay_bias": "linear_attn.dt_bias",
}
_DRAFT = DraftNames(
    layer="mtp.layers.0",
    input="mtp.fc",
    embedding_norm="mtp.pre_fc_norm_embedding",
    hidden_norm="mtp.pre_fc_norm_hidden",
    norm="mtp.norm",
)
_layout = named_layout(Names(draft=_DRAFT, **_DELTA))
_next = named_layout(
    Names(draft=_DRAFT, **{**_DELTA, "mix_in": ("linear_attn.in_proj_qkvz",), "mix_gate": ("linear_attn.in_proj_ba",)})
)
_INTERVAL = 4
"""Of so many layers the last one attends, if the config does not list them."""


def layout(description: DecoderDescription, /) -> tuple[Parameter, ...]:
    """Returns the parameters. Qwen3-Next joins the projections of linear attention in other tensors."""
    return (_next if description.family == "qwen3_next" else _layout)(description)


def describe(config: Config) -> DecoderDescription:
    """Returns the description. `split_projections`: whether tensors of Qwen3-Next are those of Qwen 3.5 (GGUF)."""
    num_layers = integer(config, "num_hidden_layers")
    is_next = bool({_NEXT, "Qwen3NextModel"}.intersection(config["architectures"]))
    delta = GatedDelta(
        layers=_without_attention(config, num_layers),
        num_key_heads=integer(config, "linear_num_key_heads", 16),
        num_value_heads=integer(config, "linear_num_value_heads", 32),
        key_dim=integer(config, "linear_key_head_dim", 128),
        value_dim=integer(config, "linear_value_head_dim", 128),
        kernel_size=integer(config, "linear_conv_kernel_dim", 4),
        norm_eps=number(config, "rms_norm_eps", 1e-6),
    )
    if not delta.layers or delta.num_value_heads % delta.num_key_heads:
        raise config_error("'layer_types' or the numbers of heads of linear attention are not those of this model.")
    fields: dict[str, Any] = {"partial_rotary_factor": 0.25, "head_dim": 256, **config}
    experts = _experts(config, num_layers) if config.get("num_experts") else None
    if experts is not None:
        # No layer uses it, but the dense ones of Qwen3-Next.
        fields["intermediate_size"] = integer(config, "intermediate_size", experts.intermediate_size)
    return llama_like(
        fields,
        "qwen3_next" if is_next and not boolean(config, "split_projections", False) else "qwen3_5",
        norm="rms_plus_one",
        qk_norm=True,
        attention_gate=True,
        qkv_bias=boolean(config, "attention_bias", False),
        o_bias=boolean(config, "attention_bias", False),
        recurrent=delta,
        experts=experts,
        offers_draft_layer=not boolean(config, "mtp_use_dedicated_embeddings", False),
        other_parts=("mtp.",),
    )


def _without_attention(config: Config, num_layers: int) -> frozenset[int]:
    kinds = config.get("layer_types")
    if kinds is None:
        interval = integer(config, "full_attention_interval", _INTERVAL)
        return frozenset(layer for layer in range(num_layers) if (layer + 1) % interval)
    if len(kinds) != num_layers or not set(kinds) <= {"linear_attention", "full_attention"}:
        raise config_error("'layer_types' must say 'linear_attention' or 'full_attention' for each layer.")
    return frozenset(layer for layer, kind in enumerate(kinds) if kind == "linear_attention")


def _experts(config: Config, num_layers: int) -> Experts:
    dense = set(config.get("mlp_only_layers") or ())
    step = integer(config, "decoder_sparse_step", 1)
    return Experts(
        num_experts=integer(config, "num_experts"),
        num_per_token=integer(config, "num_experts_per_tok"),
        intermediate_size=integer(config, "moe_intermediate_size"),
        layers=frozenset(layer for layer in range(num_layers) if layer not in dense and (layer + 1) % step == 0),
        normalise=boolean(config, "norm_topk_prob", True),
        shared_intermediate_size=integer(config, "shared_expert_intermediate_size"),
        shared_gate=True,
    )
