"""Makes the fields of config.json that Granite has besides Llama's. Called by `config`."""

from antiphon.shared.models.gguf_model.fields import Config, Fields, named
from antiphon.shared.models.gguf_model.state_spaces import state_space


def granite(fields: Fields, config: Config) -> Config:
    """Returns the fields of Granite 3."""
    factors = {
        "attention_multiplier": fields.number("attention.scale", 1.0),
        "embedding_multiplier": fields.number("embedding_scale", 1.0),
        "residual_multiplier": fields.number("residual_scale", 1.0),
        "logits_scaling": fields.number("logit_scale", 1.0),
    }
    return {**named("Granite"), **factors}


def granite_hybrid(fields: Fields, config: Config) -> Config:
    """Granite 4: layers without key heads have a state space. Gates and ups of MLPs are apart in the file."""
    heads, inner = fields.per_layer("attention.head_count_kv"), fields.integer("ssm.inner_size")
    experts = fields.integer("expert_count", 0)
    if inner % config["hidden_size"]:
        raise fields.model.fail(f"{fields.name('ssm.inner_size')} is {inner}, no multiple of {config['hidden_size']}")
    space = state_space(fields)
    return {
        **granite(fields, config),
        **named("GraniteMoeHybrid", "granitemoehybrid"),
        "layer_types": ["attention" if count else "mamba" for count in heads],
        "mamba_n_heads": space.heads,
        "mamba_d_head": space.head_dim,
        "mamba_d_state": space.state_dim,
        "mamba_n_groups": space.groups,
        "mamba_d_conv": space.kernel_size,
        "mamba_expand": inner // config["hidden_size"],
        "mamba_conv_bias": space.conv_bias,
        "mamba_proj_bias": space.bias,
        "position_embedding_type": "rope" if fields.flag("rope.scaling.finetuned", True) else "nope",
        "num_local_experts": experts,
        **({"num_experts_per_tok": fields.integer("expert_used_count")} if experts else {}),
        "shared_intermediate_size": fields.integer("expert_shared_feed_forward_length", config["intermediate_size"]),
        "split_projections": True,
    }
