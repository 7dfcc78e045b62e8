"""Makes the fields of config.json of families with state spaces (Mamba 1 and 2).

Called by `config` and `granite`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from antiphon.shared.models.gguf_model.fields import Config, Fields, named


@dataclass(frozen=True, slots=True, kw_only=True)
class FileStateSpace:
    """What a file says about state spaces (Mamba 2)."""

    heads: int
    head_dim: int
    state_dim: int
    groups: int
    kernel_size: int
    bias: bool
    conv_bias: bool


def state_space(fields: Fields) -> FileStateSpace:
    """Returns what a file says about state spaces. Raises GgufError if their heads are not equally wide."""
    heads, inner = fields.integer("ssm.time_step_rank"), fields.integer("ssm.inner_size")
    if heads < 1 or inner % heads:
        raise fields.model.fail(f"{fields.name('ssm.inner_size')} is {inner}, which are not {heads} heads")
    return FileStateSpace(
        heads=heads,
        head_dim=inner // heads,
        state_dim=fields.integer("ssm.state_size"),
        groups=fields.integer("ssm.group_count"),
        kernel_size=fields.integer("ssm.conv_kernel"),
        bias=_has(fields, "ssm_in.bias"),
        conv_bias=_has(fields, "ssm_conv1d.bias"),
    )


def nemotron_h(fields: Fields, config: Config) -> Config:
    """Nemotron H: a layer has an MLP or experts if it has a width for them, attention if it has key heads."""
    heads, widths = fields.per_layer("attention.head_count_kv"), fields.per_layer("feed_forward_length")
    space, mlp = state_space(fields), "moe" if fields.integer("expert_count", 0) else "mlp"
    kinds = [mlp if width else "attention" if count else "mamba" for count, width in zip(heads, widths, strict=True)]
    epsilon = fields.number("attention.layer_norm_epsilon", config["rms_norm_eps"])
    return {
        **named("NemotronH", "nemotron_h"),
        "layers_block_type": kinds,
        "layer_norm_epsilon": epsilon,
        "mamba_num_heads": space.heads,
        "mamba_head_dim": space.head_dim,
        "ssm_state_size": space.state_dim,
        "n_groups": space.groups,
        "conv_kernel": space.kernel_size,
        "use_bias": space.bias,
        "use_conv_bias": space.conv_bias,
        **(_nemotron_experts(fields) if mlp == "moe" else {}),
    }


def _nemotron_experts(fields: Fields) -> Config:
    latent = fields.integer("moe_latent_size", 0)
    return {
        "n_routed_experts": fields.integer("expert_count"),
        "num_experts_per_tok": fields.integer("expert_used_count"),
        "moe_intermediate_size": fields.integer("expert_feed_forward_length", some=True),
        "moe_shared_expert_intermediate_size": fields.integer("expert_shared_feed_forward_length"),
        "norm_topk_prob": fields.flag("expert_weights_norm", False),
        "routed_scaling_factor": fields.number("expert_weights_scale", 1.0),
        "n_group": fields.integer("expert_group_count", 1),
        "topk_group": fields.integer("expert_group_used_count", 1),
        **({"moe_latent_size": latent} if latent else {}),
    }


def mamba(fields: Fields, config: Config) -> Config:
    """Mamba 1. Falcon Mamba, which norms what the step, B and C are made of, has the same name in GGUF."""
    falcon = fields.flag("ssm.dt_b_c_rms", False)
    return {
        **(named("FalconMamba", "falcon_mamba") if falcon else named("Mamba")),
        "layer_norm_epsilon": config["rms_norm_eps"],
        "intermediate_size": fields.integer("ssm.inner_size"),
        "state_size": fields.integer("ssm.state_size"),
        "time_step_rank": fields.integer("ssm.time_step_rank"),
        "conv_kernel": fields.integer("ssm.conv_kernel"),
        "use_bias": _has(fields, "ssm_in.bias"),
        "use_conv_bias": _has(fields, "ssm_conv1d.bias"),
    }


def mamba2(fields: Fields, config: Config) -> Config:
    """Returns the fields of Mamba 2."""
    space = state_space(fields)
    return {
        **named("Mamba2"),
        "layer_norm_epsilon": config["rms_norm_eps"],
        "num_heads": space.heads,
        "head_dim": space.head_dim,
        "state_size": space.state_dim,
        "n_groups": space.groups,
        "conv_kernel": space.kernel_size,
        "use_bias": space.bias,
        "use_conv_bias": space.conv_bias,
    }


def falcon_h1(fields: Fields, config: Config) -> Config:
    """Falcon H1: the file's matrices include all factors, so the config has none."""
    space = state_space(fields)
    return {
        **named("FalconH1", "falcon_h1"),
        "mamba_d_ssm": space.heads * space.head_dim,
        "mamba_n_heads": space.heads,
        "mamba_d_head": space.head_dim,
        "mamba_d_state": space.state_dim,
        "mamba_n_groups": space.groups,
        "mamba_d_conv": space.kernel_size,
        "mamba_proj_bias": space.bias,
        "projectors_bias": space.bias,
        "mamba_conv_bias": space.conv_bias,
        "mamba_rms_norm": _has(fields, "ssm_norm.weight"),
        "mamba_norm_before_gate": False,
        "mlp_bias": _has(fields, "ffn_up.bias"),
    }


def jamba(fields: Fields, config: Config) -> Config:
    """Jamba: layers without key heads have a state space, those with a router have experts."""
    heads, inner = fields.per_layer("attention.head_count_kv"), fields.integer("ssm.inner_size")
    if inner % config["hidden_size"]:
        raise fields.model.fail(f"{fields.name('ssm.inner_size')} is {inner}, no multiple of {config['hidden_size']}")
    attending = [layer for layer, count in enumerate(heads) if count]
    routed = [layer for layer in range(len(heads)) if f"blk.{layer}.ffn_gate_inp.weight" in fields.model.tensors]
    experts: Config = {"num_experts": 1}
    if routed:
        experts = {
            "num_experts": fields.integer("expert_count"),
            "num_experts_per_tok": fields.integer("expert_used_count"),
            **_every(fields, "expert_layer", routed),
        }
    return {
        **named("Jamba"),
        **_every(fields, "attn_layer", attending),
        **experts,
        "mamba_d_state": fields.integer("ssm.state_size"),
        "mamba_dt_rank": fields.integer("ssm.time_step_rank"),
        "mamba_d_conv": fields.integer("ssm.conv_kernel"),
        "mamba_expand": inner // config["hidden_size"],
        "mamba_proj_bias": _has(fields, "ssm_in.bias"),
        "mamba_conv_bias": _has(fields, "ssm_conv1d.bias"),
    }


def _every(fields: Fields, kind: str, layers: Sequence[int]) -> Config:
    """Returns the fields of config.json that say which layers are of a kind: every n-th one, from an offset on."""
    if not layers:
        raise fields.model.fail(f"no layer is of the kind {kind}")
    count, first = fields.num_layers, layers[0]
    period = layers[1] - first if len(layers) > 1 else count
    if list(layers) != list(range(first, count, period)) or first >= period:
        raise fields.model.fail(f"the layers of the kind {kind} are not every n-th one")
    return {f"{kind}_period": period, f"{kind}_offset": first}


def _has(fields: Fields, name: str) -> bool:
    return any(tensor.endswith(f".{name}") for tensor in fields.model.tensors)
