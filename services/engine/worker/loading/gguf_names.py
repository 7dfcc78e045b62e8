"""The names of tensors in GGUF files (gguf-py's `tensor_mapping.py`), and those of the families' checkpoints.

Called by `gguf_file`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

_ONE_EXPERT = re.compile(r"ffn_(gate|up|down)\.(\d+)")
_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_NEXTN = {
    "nextn.eh_proj.weight": "mtp.fc.weight",
    "nextn.enorm.weight": "mtp.pre_fc_norm_embedding.weight",
    "nextn.hnorm.weight": "mtp.pre_fc_norm_hidden.weight",
    "nextn.shared_head_norm.weight": "mtp.norm.weight",
}
_MIXTRAL_PARTS = {"gate": "w1", "up": "w3", "down": "w2"}


def _none() -> dict[str, str]:
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Names:
    """The names of one architecture, where they differ from those of Qwen. Keys are names in files."""

    inner: Mapping[str, str] = field(default_factory=_none)
    """Those of a layer's tensors, relative to the layer and without endings."""
    whole: Mapping[str, str] = field(default_factory=_none)
    """The same with endings, where a family's name has another ending or none."""
    outer: Mapping[str, str] = field(default_factory=_none)
    """Those outside of layers, without endings. `{}` stands for the number of one of several matrices in a tensor."""
    layers: str = "model.layers"
    expert: str = "mlp.experts.{}.{}_proj"
    """The matrix of an expert, by number and part."""
    expert_parts: Mapping[str, str] = field(default_factory=_none)
    stacked: Mapping[str, str] = field(default_factory=_none)
    """Tensors of all experts of a layer, by part, in families that have such tensors."""
    drafts: Mapping[str, str] = field(default_factory=lambda: _NEXTN)
    """What a layer that predicts further tokens has besides other layers, with endings."""
    draft_layers: tuple[str, str] = ("mtp.layers.{}", "mtp.layers.{}")
    """Where the attention of such a layer is, and the rest of it."""


def _under(prefix: str, names: Mapping[str, str]) -> dict[str, str]:
    return {theirs: f"{prefix}.{ours}" for theirs, ours in names.items()}


_MAMBA = {"ssm_in": "in_proj", "ssm_conv1d": "conv1d", "ssm_x": "x_proj", "ssm_dt": "dt_proj", "ssm_out": "out_proj"}
_MAMBA_WHOLE = {"ssm_a": "A_log", "ssm_d": "D"}
_MAMBA2 = {"ssm_in": "in_proj", "ssm_conv1d": "conv1d", "ssm_norm": "norm", "ssm_out": "out_proj"}
_MAMBA2_WHOLE = {"ssm_a": "A_log", "ssm_d": "D", "ssm_dt.bias": "dt_bias"}
_BACKBONE = {"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f"}
_FINAL_LAYERNORM = {"output_norm": "model.final_layernorm"}
_FEED_FORWARD = {
    "ffn_gate": "feed_forward.gate_proj",
    "ffn_up": "feed_forward.up_proj",
    "ffn_down": "feed_forward.down_proj",
    "ffn_gate_inp": "feed_forward.router",
    "ffn_gate_shexp": "feed_forward.shared_expert.gate_proj",
    "ffn_up_shexp": "feed_forward.shared_expert.up_proj",
    "ffn_down_shexp": "feed_forward.shared_expert.down_proj",
}
_FEED_FORWARD_EXPERT = "feed_forward.experts.{}.{}_proj"
_MIXTRAL_EXPERT = "block_sparse_moe.experts.{}.{}"

_GEMMA = _Names(
    inner={
        "ffn_norm": "pre_feedforward_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }
)
_LAYER_INPUTS = _Names(
    inner={
        **_GEMMA.inner,
        "inp_gate": "per_layer_input_gate",
        "proj": "per_layer_projection",
        "post_norm": "post_per_layer_input_norm",
    },
    outer={
        "per_layer_token_embd": "model.embed_tokens_per_layer",
        "per_layer_model_proj": "model.per_layer_model_projection",
        "per_layer_proj_norm": "model.per_layer_projection_norm",
    },
)
_GEMMA3N = _Names(
    inner={
        **_LAYER_INPUTS.inner,
        "altup_router": "altup.modality_router",
        "altup_router_norm": "altup.router_norm",
        "altup_predict_coef": "altup.prediction_coefs",
        "altup_correct_coef": "altup.correction_coefs",
        "laurel_l": "laurel.linear_left",
        "laurel_r": "laurel.linear_right",
        "laurel_post_norm": "laurel.post_laurel_norm",
    },
    whole={"altup_correct_scale.weight": "altup.correct_output_scale"},
    outer={
        **_LAYER_INPUTS.outer,
        "altup_proj": "model.altup_projections.{}",
        "altup_unembd_proj": "model.altup_unembed_projections.{}",
    },
)
_GEMMA4 = _Names(
    inner={
        **_LAYER_INPUTS.inner,
        "ffn_gate_inp": "router.proj",
        "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
        "post_ffw_norm_1": "post_feedforward_layernorm_1",
        "post_ffw_norm_2": "post_feedforward_layernorm_2",
    },
    whole={
        "layer_output_scale.weight": "layer_scalar",
        "ffn_gate_inp.scale": "router.scale",
        "ffn_down_exps.scale": "router.per_expert_scale",
    },
    outer=_LAYER_INPUTS.outer,
    stacked={"gate_up": "experts.gate_up_proj", "down": "experts.down_proj"},
)
_LFM2 = _Names(
    inner={
        "attn_norm": "operator_norm",
        "attn_output": "self_attn.out_proj",
        "attn_q_norm": "self_attn.q_layernorm",
        "attn_k_norm": "self_attn.k_layernorm",
        "shortconv.in_proj": "conv.in_proj",
        "shortconv.conv": "conv.conv",
        "shortconv.out_proj": "conv.out_proj",
        "ffn_norm": "ffn_norm",
        "ffn_gate": "feed_forward.w1",
        "ffn_up": "feed_forward.w3",
        "ffn_down": "feed_forward.w2",
        "ffn_gate_inp": "feed_forward.gate",
    },
    whole={"exp_probs_b.bias": "feed_forward.expert_bias"},
    outer={"token_embd_norm": "model.embedding_norm"},
    expert="feed_forward.experts.{}.{}",
    expert_parts=_MIXTRAL_PARTS,
)
_DELTA = _Names(
    inner={
        "post_attention_norm": "post_attention_layernorm",
        "attn_qkv": "linear_attn.in_proj_qkv",
        "attn_gate": "linear_attn.in_proj_z",
        "ssm_beta": "linear_attn.in_proj_b",
        "ssm_alpha": "linear_attn.in_proj_a",
        "ssm_in": "linear_attn.in_proj_qkvz",
        "ssm_ba": "linear_attn.in_proj_ba",
        "ssm_conv1d": "linear_attn.conv1d",
        "ssm_norm": "linear_attn.norm",
        "ssm_out": "linear_attn.out_proj",
    },
    whole={"ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"},
)
_KIMI = _Names(
    inner={
        **_under(
            "self_attn",
            {
                **{f"ssm_conv1d_{part}": f"{part}_conv1d" for part in "qkv"},
                **{f"ssm_{gate}_{part}": f"{gate}_{part}_proj" for gate in "fg" for part in "ab"},
                "ssm_beta": "b_proj",
                "ssm_norm": "o_norm",
                "attn_kv_a_mqa": "kv_a_proj_with_mqa",
                "attn_kv_a_norm": "kv_a_layernorm",
                "attn_kv_b": "kv_b_proj",
            },
        ),
        "ffn_gate_inp": "block_sparse_moe.gate",
        "ffn_gate_shexp": "block_sparse_moe.shared_experts.gate_proj",
        "ffn_up_shexp": "block_sparse_moe.shared_experts.up_proj",
        "ffn_down_shexp": "block_sparse_moe.shared_experts.down_proj",
    },
    whole={
        "ssm_a": "self_attn.A_log",
        "ssm_dt.bias": "self_attn.dt_bias",
        "exp_probs_b.bias": "block_sparse_moe.gate.e_score_correction_bias",
    },
    expert=_MIXTRAL_EXPERT,
    expert_parts=_MIXTRAL_PARTS,
)
_MAMBA_ONLY = _Names(
    inner={"attn_norm": "norm", **_under("mixer", _MAMBA)},
    whole=_under("mixer", _MAMBA_WHOLE),
    outer=_BACKBONE,
    layers="backbone.layers",
)
_NEMOTRON_PARTS = {
    "attn_q": "q_proj",
    "attn_k": "k_proj",
    "attn_v": "v_proj",
    "attn_output": "o_proj",
    "ffn_up": "up_proj",
    "ffn_down": "down_proj",
    "ffn_gate_inp": "gate",
    "ffn_up_shexp": "shared_experts.up_proj",
    "ffn_down_shexp": "shared_experts.down_proj",
    "ffn_latent_down": "fc1_latent_proj",
    "ffn_latent_up": "fc2_latent_proj",
}
_NEMOTRON = _Names(
    inner={"attn_norm": "norm", **_under("mixer", _MAMBA2 | _NEMOTRON_PARTS)},
    whole=_under("mixer", {**_MAMBA2_WHOLE, "exp_probs_b.bias": "gate.e_score_correction_bias"}),
    outer=_BACKBONE,
    layers="backbone.layers",
    expert="mixer.experts.{}.{}_proj",
    # In its checkpoints the attention and the experts of such a layer are a layer each.
    drafts={
        "nextn.eh_proj.weight": "mtp.layers.0.eh_proj.weight",
        "nextn.enorm.weight": "mtp.layers.0.enorm.weight",
        "nextn.hnorm.weight": "mtp.layers.0.hnorm.weight",
        "nextn.shared_head_norm.weight": "mtp.layers.1.final_layernorm.weight",
        "post_attention_norm.weight": "mtp.layers.1.norm.weight",
    },
    draft_layers=("mtp.layers.0", "mtp.layers.1"),
)
_ARCHITECTURES = {
    "falcon-h1": _Names(
        inner={**_under("mamba", _MAMBA2), **_FEED_FORWARD, "ffn_norm": "pre_ff_layernorm"},
        # Its converter leaves out the ending of a norm.
        whole={**_under("mamba", _MAMBA2_WHOLE), "ffn_norm": "pre_ff_layernorm.weight"},
        outer=_FINAL_LAYERNORM,
    ),
    "gemma2": _GEMMA,
    "gemma3": _GEMMA,
    "gemma3n": _GEMMA3N,
    "gemma4": _GEMMA4,
    "granitehybrid": _Names(inner=_under("mamba", _MAMBA2), whole=_under("mamba", _MAMBA2_WHOLE)),
    "jamba": _Names(
        inner={
            **_under("mamba", _MAMBA),
            **_under("mamba", {f"ssm_{part}_norm": f"{part}_layernorm" for part in ("dt", "b", "c")}),
            **_FEED_FORWARD,
            "ffn_norm": "pre_ff_layernorm",
        },
        whole=_under("mamba", _MAMBA_WHOLE),
        outer=_FINAL_LAYERNORM,
        expert=_FEED_FORWARD_EXPERT,
    ),
    "kimi-linear": _KIMI,
    "lfm2": _LFM2,
    "lfm2moe": _LFM2,
    "llama": _Names(
        inner={"ffn_gate_inp": "block_sparse_moe.gate"}, expert=_MIXTRAL_EXPERT, expert_parts=_MIXTRAL_PARTS
    ),
    "llama4": _Names(inner=_FEED_FORWARD, expert=_FEED_FORWARD_EXPERT),
    "mamba": _MAMBA_ONLY,
    "mamba2": replace(
        _MAMBA_ONLY,
        inner={"attn_norm": "norm", **_under("mixer", _MAMBA2)},
        whole=_under("mixer", _MAMBA2_WHOLE),
    ),
    "nemotron_h": _NEMOTRON,
    "nemotron_h_moe": _NEMOTRON,
    "phi3": _Names(inner={"ffn_up": "mlp.gate_up_proj"}),
    "qwen35": _DELTA,
    "qwen35moe": _DELTA,
    "qwen3next": _DELTA,
}
_USUAL = _Names()


def outer_name(architecture: str, name: str) -> str:
    """Returns the family's name of a tensor outside of layers; an unknown name unchanged, for the reader's check.

    If the tensor has several matrices, `{}` in the name stands for the number of one.
    """
    stem, _, kind = name.rpartition(".")
    outer = _of(architecture).outer
    return f"{outer.get(stem) or _OUTER.get(stem, stem)}.{kind}"


def layer_name(architecture: str, layer: int, num_layers: int, name: str) -> str:
    """Returns the family's name of a tensor of the `layer`-th of the file's layers.

    Those from `num_layers` on predict further tokens. Unknown names stay unchanged, for the reader's check.
    """
    drafts = _of(architecture).drafts if layer >= num_layers else {}
    return drafts.get(name) or layer_prefix(architecture, layer, num_layers, name) + _inner_name(architecture, name)


def layer_prefix(architecture: str, layer: int, num_layers: int, name: str) -> str:
    """Returns what the family's name of a layer's tensor begins with. `name`: its name in the file."""
    names = _of(architecture)
    if layer < num_layers:
        return f"{names.layers}.{layer}."
    attention, rest = names.draft_layers
    return f"{(attention if name.startswith('attn_') else rest).format(layer - num_layers)}."


def expert_name(architecture: str, part: str, expert: int) -> str:
    """Returns the name of a matrix of an expert, without its ending. `part`: gate, up or down."""
    names = _of(architecture)
    return names.expert.format(expert, names.expert_parts.get(part, part))


def stacked_name(architecture: str, part: str) -> str | None:
    """Returns the name of one tensor of all experts of a layer, without an ending; None if the family has many."""
    return _of(architecture).stacked.get(part)


def _inner_name(architecture: str, name: str) -> str:
    names = _of(architecture)
    if (whole := names.whole.get(name)) is not None:
        return whole
    stem, _, kind = name.rpartition(".")
    if (one := _ONE_EXPERT.fullmatch(stem)) is not None:
        return f"{expert_name(architecture, one[1], int(one[2]))}.{kind}"
    return f"{names.inner.get(stem) or _INNER.get(stem, stem)}.{kind}"


def _of(architecture: str) -> _Names:
    return _ARCHITECTURES.get(architecture, _USUAL)
