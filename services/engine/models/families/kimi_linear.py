"""Kimi Linear: delta rules with decays for each channel in most layers, in the others latent attention.

Neither has rotary positions. Experts are those of DeepSeek V3.
"""

from typing import Any

from antiphon.services.engine.models.about import About
from antiphon.services.engine.models.config_fields import Config, config_error, integer, number
from antiphon.services.engine.models.description import DecoderDescription
from antiphon.services.engine.models.families import deepseek
from antiphon.services.engine.models.layout import Names, named_layout
from antiphon.services.engine.models.recurrent_kinds import ChannelDelta

ARCHITECTURES = ("KimiLinearForCausalLM",)
ABOUT = About(tools=("kimi_k2",))
layout = named_layout(
    Names(
        mix_in=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        mix_gate=("self_attn.f_a_proj", "self_attn.g_a_proj", "self_attn.b_proj"),
        mix_decay="self_attn.f_b_proj",
        mix_out_gate="self_attn.g_b_proj",
        mix_out="self_attn.o_proj",
        conv=("self_attn.q_conv1d", "self_attn.k_conv1d", "self_attn.v_conv1d"),
        mix_norm="self_attn.o_norm",
        decay="self_attn.A_log",
        decay_bias="self_attn.dt_bias",
        router="block_sparse_moe.gate",
        correction="block_sparse_moe.gate.e_score_correction_bias",
        expert_up=("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
        expert_down="block_sparse_moe.experts.{}.w2",
        shared_up=("block_sparse_moe.shared_experts.gate_proj", "block_sparse_moe.shared_experts.up_proj"),
        shared_down="block_sparse_moe.shared_experts.down_proj",
    )
)
_OTHER_NAMES = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts": "n_routed_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
    "num_local_experts": "n_routed_experts",
}
"""Names of fields, and those of DeepSeek's configs for them."""
_DEFAULTS: dict[str, Any] = {
    "max_position_embeddings": 1_048_576,
    "rms_norm_eps": 1e-5,
    "routed_scaling_factor": 2.446,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1024,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": None,
}


def describe(config: Config) -> DecoderDescription:
    """Returns the description."""
    renamed = {_OTHER_NAMES.get(name, name): value for name, value in config.items() if name != "head_dim"}
    fields = {**_DEFAULTS, **renamed, "rope_parameters": None, "rope_scaling": None}
    num_layers, nested = integer(fields, "num_hidden_layers"), config.get("linear_attn_config") or {}
    layers = _linear_layers(fields, nested, num_layers)
    if not layers:
        raise config_error("'layer_types' has no layer of the kind 'linear_attention'.")
    head_dim = integer(nested, "head_dim", integer(fields, "linear_head_dim", 128))
    kernel_size = integer(nested, "short_conv_kernel_size", integer(fields, "linear_conv_kernel_dim", 4))
    recurrent = ChannelDelta(
        layers=layers,
        num_heads=integer(nested, "num_heads", integer(fields, "linear_num_heads", 32)),
        key_dim=head_dim,
        value_dim=head_dim,
        rank=head_dim,
        kernel_size=kernel_size,
        norm_eps=number(fields, "rms_norm_eps", 1e-5),
    )
    return deepseek.with_latents(
        fields, "kimi_linear", deepseek.V3, rope=None, recurrent=recurrent, offers_draft_layer=False, other_parts=()
    )


def _linear_layers(fields: Config, nested: Config, num_layers: int) -> frozenset[int]:
    """Returns the layers with linear attention. `kda_layers` numbers them from 1."""
    kinds = fields.get("layer_types")
    if kinds is None and nested.get("kda_layers") is not None:
        listed = [*nested["kda_layers"], *(nested.get("full_attn_layers") or [])]
        if sorted(listed) != list(range(1, num_layers + 1)):
            raise config_error(f"'kda_layers' and 'full_attn_layers' must have each of {num_layers} layers once.")
        return frozenset(layer - 1 for layer in nested["kda_layers"])
    if kinds is None:
        return frozenset(layer for layer in range(num_layers) if layer % 4 or not layer)
    if len(kinds) != num_layers or set(kinds) - {"linear_attention", "full_attention"}:
        raise config_error(f"'layer_types' must say 'linear_attention' or 'full_attention' for {num_layers} layers.")
    return frozenset(layer for layer, kind in enumerate(kinds) if kind == "linear_attention")
