"""Nemotron H: most layers have a state space (Mamba 2), some attention without positions, an MLP or experts.

A layer of these checkpoints has one norm and one of the four. One of the first two and the MLP or experts that follow
it are one layer here; another state space or attention that follows begins the next layer. MLPs, also those of experts,
square what relu gives and have no gates. Experts are chosen by corrected sigmoids, beside a shared one, and may be
narrower than the hidden states.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from antiphon.services.engine.models.about import About
from antiphon.services.engine.models.config_fields import (
    Config,
    activation,
    boolean,
    config_error,
    integer,
    llama_like,
    number,
    refuse_unless,
)
from antiphon.services.engine.models.description import DecoderDescription, Experts
from antiphon.services.engine.models.layout import DraftNames, Names, Parameter, Source, named_layout
from antiphon.services.engine.models.recurrent_kinds import StateSpace
from antiphon.services.engine.models.state_spaces import checked, names_under, step_limits

ARCHITECTURES = ("NemotronHForCausalLM",)
ABOUT = About(
    models="Nemotron H, Nemotron Nano 2, Nemotron 3",
    tools=("nemotron", "qwen3_coder"),
    reasoning=("qwen3",),
)
_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_KINDS = {**{kind: kind for kind in _LETTERS.values()}, "linear_attention": "mamba", "full_attention": "attention"}
_names = Names(
    embedding="backbone.embeddings",
    final_norm="backbone.norm_f",
    layer="{}",
    **names_under("first.mixer"),
    input_norm="first.norm",
    qkv=("first.mixer.q_proj", "first.mixer.k_proj", "first.mixer.v_proj"),
    o="first.mixer.o_proj",
    mlp_norm="second.norm",
    up=("second.mixer.up_proj",),
    down="second.mixer.down_proj",
    router="second.mixer.gate",
    correction="second.mixer.gate.e_score_correction_bias",
    expert_in="second.mixer.fc1_latent_proj",
    expert_out="second.mixer.fc2_latent_proj",
    expert_up=("second.mixer.experts.{}.up_proj",),
    expert_down="second.mixer.experts.{}.down_proj",
    shared_up=("second.mixer.shared_experts.up_proj",),
    shared_down="second.mixer.shared_experts.down_proj",
)
_FIRST, _SECOND = "mtp.layers.first.", "mtp.layers.second."
_DRAFT = DraftNames(
    layer="mtp.layers",
    input="mtp.layers.0.eh_proj",
    embedding_norm="mtp.layers.0.enorm",
    hidden_norm="mtp.layers.0.hnorm",
    norm="mtp.layers.1.final_layernorm",
)
_layout = named_layout(replace(_names, draft=_DRAFT))
_PLACE = re.compile(r"(\d+)\.(first|second)\.")
"""Beginning of the names that `_names` gives: a layer here, and which of its one or two layers of the checkpoint."""


def layout(description: DecoderDescription, /) -> tuple[Parameter, ...]:
    """Returns the parameters, with the numbers that layers have in checkpoints."""
    firsts, count = list[int](), 0
    for layer in range(description.num_layers):
        firsts.append(count)
        count += 2 if description.has_mlp(layer) else 1

    def theirs(source: Source) -> Source:
        if (found := _PLACE.match(source.name)) is None:
            name = source.name.replace(_FIRST, "mtp.layers.0.").replace(_SECOND, "mtp.layers.1.")
            return replace(source, name=name)
        layer = firsts[int(found[1])] + (found[2] == "second")
        return replace(source, name=f"backbone.layers.{layer}.{source.name[found.end() :]}")

    parameters = _layout(description)
    return tuple(replace(each, sources=tuple(map(theirs, each.sources))) for each in parameters)


def describe(config: Config) -> DecoderDescription:
    """Returns the description."""
    mixers, mlps = _layers(_kinds(config))
    of_kind = {kind: frozenset(layer for layer, one in enumerate(mlps) if one == kind) for kind in ("", "moe")}
    state_spaces = frozenset(layer for layer, kind in enumerate(mixers) if kind == "mamba")
    refuse_unless(config, "mlp_bias", False)
    refuse_unless(config, "attention_bias", False)
    fields: dict[str, Any] = {
        "intermediate_size": 21_504,
        "max_position_embeddings": 4096,
        "num_key_value_heads": 8,
        "head_dim": config.get("attention_head_dim") or 128,
        **config,
        "num_hidden_layers": len(mixers),
        "rms_norm_eps": _epsilon(config),
    }
    return llama_like(
        fields,
        "nemotron_h",
        rope=None,
        activation=activation(config, "mlp_hidden_act", "relu2"),
        gated_mlp=False,
        tied_embeddings=False,
        without_mlp=of_kind[""],
        experts=_experts(config, of_kind["moe"]) if of_kind["moe"] else None,
        recurrent=_state_space(config, state_spaces) if state_spaces else None,
        offers_draft_layer=_offers_draft_layer(config),
        other_parts=("mtp.",),
    )


def _offers_draft_layer(config: Config) -> bool:
    """Whether a draft layer is attention and then experts, which is one layer here."""
    found = config.get("mtp_layers_block_type") or list(config.get("mtp_hybrid_override_pattern") or "*E")
    return [{**_KINDS, **_LETTERS}.get(kind) for kind in found] == ["attention", "moe"]


def _epsilon(config: Config) -> float:
    return number(config, "layer_norm_epsilon", number(config, "rms_norm_eps", 1e-5))


def _kinds(config: Config) -> list[str]:
    """Returns the kinds of the checkpoint's layers, which newer configs list and older ones write as letters."""
    found = config.get("layers_block_type") or config.get("layer_types")
    known: Mapping[str, str] = _KINDS
    if not found:
        found, known = list(config.get("hybrid_override_pattern") or ""), _LETTERS
    if not found or not isinstance(found, list) or not known.keys() >= set(found):
        raise config_error("'layers_block_type' must list layers of the kinds 'mamba', 'attention', 'mlp' and 'moe'.")
    return [known[kind] for kind in found]


def _layers(kinds: list[str]) -> tuple[list[str], list[str]]:
    """Returns what each layer here begins with, and the kind of its MLP; empty: it has none."""
    mixers, mlps = list[str](), list[str]()
    for place, kind in enumerate(kinds):
        if kind in ("mamba", "attention"):
            mixers.append(kind)
            mlps.append("")
        elif place == 0 or mlps[-1]:
            raise config_error(f"layer {place} of the kind {kind!r} does not follow one of 'mamba' or 'attention'.")
        else:
            mlps[-1] = kind
    return mixers, mlps


def _state_space(config: Config, layers: frozenset[int]) -> StateSpace:
    return checked(
        StateSpace(
            layers=layers,
            num_heads=integer(config, "mamba_num_heads", 128),
            head_dim=integer(config, "mamba_head_dim", 64),
            state_dim=integer(config, "ssm_state_size", 128),
            num_groups=integer(config, "n_groups", config.get("mamba_n_groups") or 8),
            kernel_size=integer(config, "conv_kernel", config.get("mamba_d_conv") or 4),
            norm_eps=_epsilon(config),
            bias=boolean(config, "use_bias", False),
            conv_bias=boolean(config, "use_conv_bias", boolean(config, "mamba_conv_bias", True)),
            step_limits=step_limits(config),
        )
    )


def _experts(config: Config, layers: frozenset[int]) -> Experts:
    return Experts(
        num_experts=integer(config, "n_routed_experts", 8),
        num_per_token=integer(config, "num_experts_per_tok", 2),
        intermediate_size=integer(config, "moe_intermediate_size", 7688),
        layers=layers,
        normalise=boolean(config, "norm_topk_prob", True),
        shared_intermediate_size=integer(config, "moe_shared_expert_intermediate_size", 7688),
        shared_gate=False,
        scoring="sigmoid",
        correction=True,
        num_groups=integer(config, "n_group", 1),
        num_chosen_groups=integer(config, "topk_group", 1),
        scale=number(config, "routed_scaling_factor", 1.0),
        latent_size=integer(config, "moe_latent_size") if config.get("moe_latent_size") else 0,
    )
