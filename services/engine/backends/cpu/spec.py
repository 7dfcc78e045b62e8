"""A decoder's description as the structure that the C++ library takes (`source/abi.h`). Called by `decoder`."""

from typing import Any, get_args

import torch

from antiphon.services.engine.backends.cpu.native import Spec
from antiphon.services.engine.models.description import (
    ActivationKind,
    DecoderDescription,
    Experts,
    GateKind,
    LayerInputs,
    NormKind,
    QueryGrowth,
    ResidualKind,
    ScoringKind,
)
from antiphon.services.engine.models.recurrent_kinds import (
    ChannelDelta,
    ChannelSpace,
    GatedDelta,
    Recurrent,
    SpaceNormKind,
    StateSpace,
)

_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
"""The 8-bit types of the KV cache, in the order of the library's enumeration, where the model's type comes first."""


def make_spec(
    d: DecoderDescription,
    dtype: torch.dtype,
    block_size: int,
    threads: int,
    lora: tuple[int, int] = (0, 0),
    cache_dtype: torch.dtype | None = None,
) -> Spec:
    """Returns the description as the library takes it."""
    latent = d.latent
    return Spec(
        vocab_size=d.vocab_size,
        hidden_size=d.hidden_size,
        num_layers=d.num_layers,
        num_heads=d.num_heads,
        num_kv_heads=d.num_kv_heads,
        head_dim=d.head_dim,
        intermediate_size=d.intermediate_size,
        block_size=block_size,
        threads=threads,
        norm=get_args(NormKind).index(d.norm),
        activation=get_args(ActivationKind).index(d.activation),
        residual=get_args(ResidualKind).index(d.residual),
        gated_mlp=d.gated_mlp,
        shared_norm=d.shared_norm,
        qk_norm=3 if d.qk_norm_rotated else d.qk_norm + d.whole_qk_norm,
        wide=dtype == torch.float32,
        learned_position_offset=d.learned_position_offset,
        **_expert_fields(d.experts),
        cache=1 + _FLOAT8.index(cache_dtype) if cache_dtype in _FLOAT8 else 0,
        lora_slots=lora[0],
        lora_rank=lora[1],
        latent_rank=latent.rank if latent else 0,
        latent_nope=latent.nope_dim if latent else 0,
        latent_value=latent.value_dim if latent else 0,
        query_rank=latent.query_rank if latent else 0,
        latent_eps=latent.norm_eps if latent else 0.0,
        num_gates=d.num_gates,
        gate_kind=get_args(GateKind).index(d.gate_kind),
        value_norm=d.value_norm,
        group=d.num_heads // min(count for count, _ in d.layer_kv_heads) if d.layer_kv_heads else 0,
        **_input_fields(d.layer_inputs, dtype),
        **_stream_fields(d),
        num_draft_layers=d.num_draft_layers,
        **_growth_fields(d.query_growth),
        chunked_windows=d.chunked_windows,
        norm_eps=d.norm_eps,
        attended_scale=d.attended_scale,
        mlp_gate_scale=d.mlp_scales[0],
        mlp_scale=d.mlp_scales[1],
        attends_beside=d.attends_beside,
        query_scale=d.head_dim**-0.5 if d.query_scale is None else d.query_scale,
        attention_softcap=d.attention_softcap or 0.0,
        logits_softcap=d.logits_softcap or 0.0,
        logits_scale=d.logits_scale,
        embedding_scale=torch.tensor(d.embedding_scale, dtype=dtype).item()
        if d.rounded_embedding_scale
        else d.embedding_scale,
        **_recurrent_fields(d.recurrent),
    )


def _growth_fields(growth: QueryGrowth | None) -> dict[str, Any]:
    """Returns the fields of the spec about queries that grow with the position."""
    if growth is None:
        return {}
    return {
        "query_growth_length": growth.length,
        "query_growth_first": growth.first,
        "query_growth_unrotated": growth.unrotated,
        "query_growth_rate": growth.rate,
    }


def _recurrent_fields(shape: Recurrent | None) -> dict[str, Any]:
    """Returns the fields of the spec about layers with a recurrent state."""
    if shape is None:
        return {}
    fields = {
        "conv_kernel": shape.kernel_size,
        "mixed_width": sum(shape.in_widths),
        "mixer_width": shape.width,
        "mixer": get_args(Recurrent).index(type(shape)),
    }
    if isinstance(shape, GatedDelta):
        keys, values = (shape.num_key_heads, shape.key_dim), (shape.num_value_heads, shape.value_dim)
        fields |= {"mix_eps": shape.norm_eps}
    elif isinstance(shape, StateSpace):
        keys, values = (shape.num_groups, shape.state_dim), (shape.num_heads, shape.head_dim)
        least, most = shape.step_limits
        fields |= {"mix_eps": shape.norm_eps, "step_least": least, "step_most": most}
        fields |= {"mix_norm_kind": get_args(SpaceNormKind).index(shape.norm)}
        fields |= {"mix_gate_scale": shape.scales[0], "step_scale": shape.scales[-1]}
    elif isinstance(shape, ChannelSpace):
        keys, values = (shape.step_rank, shape.state_dim), (1, shape.channels)
        fields |= {"mix_eps": shape.norm_eps, "mix_norm_kind": shape.part_norms != "none"}
    elif isinstance(shape, ChannelDelta):
        keys, values = (shape.num_heads, shape.key_dim), (shape.num_heads, shape.value_dim)
        fields |= {"mix_eps": shape.norm_eps, "mix_rank": shape.rank}
    else:
        return fields
    names = ("mix_key_heads", "mix_key_dim", "mix_value_heads", "mix_value_dim")
    return fields | dict(zip(names, (*keys, *values), strict=True))


def _input_fields(inputs: LayerInputs | None, dtype: torch.dtype) -> dict[str, Any]:
    """Returns the fields of the spec about the inputs of layers."""
    if inputs is None:
        return {}
    scale = torch.tensor(inputs.size**0.5, dtype=dtype).item()
    return {"input_size": inputs.size, "input_rows": inputs.vocab_size, "input_scale": scale}


def _stream_fields(d: DecoderDescription) -> dict[str, Any]:
    """Returns the fields of the spec about residual streams, and gates that are cut."""
    streams = {"num_streams": d.streams.count, "side_rank": d.streams.side_rank} if d.streams else {}
    return {"cuts_gates": bool(d.gate_cuts), **streams}


def _expert_fields(experts: Experts | None) -> dict[str, Any]:
    """Returns the fields of the spec about mixtures of experts."""
    if experts is None:
        return {"expert_groups": 1, "chosen_groups": 1, "expert_scale": 1.0, "best_of_group": 1}
    return {
        "num_experts": experts.num_experts,
        "experts_per_token": experts.num_per_token,
        "expert_size": experts.intermediate_size,
        "shared_expert_size": experts.shared_intermediate_size,
        "normalise_experts": experts.normalise,
        "expert_scoring": get_args(ScoringKind).index(experts.scoring),
        "expert_groups": experts.num_groups,
        "chosen_groups": experts.num_chosen_groups,
        "expert_scale": experts.scale,
        "best_of_group": experts.best_of_group,
        "expert_latent": experts.latent_size,
        "experts_beside": experts.beside_mlp,
        "weighted_inputs": experts.weighted_inputs,
    }
