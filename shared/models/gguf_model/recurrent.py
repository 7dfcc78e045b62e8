"""Makes the fields of config.json of families in which layers have a recurrent state in place of attention.

Called by `config`.
"""

from antiphon.shared.models.gguf_model.fields import Config, Fields, named, window

_SIGMOID = 2
"""Number of sigmoids in `expert_gating_func`."""
_INTERVAL = 4
"""Of so many layers of Qwen 3.5 the last one attends, if the file does not say which ones do."""

JOINED = "ssm_in.weight"
"""What layers of Qwen3-Next have in older files, as in its checkpoints: queries, keys, values and gates in one."""


def lfm2(fields: Fields, config: Config) -> Config:
    """LFM2: layers without key heads have a convolution. Their MLP has its final width in the file."""
    model, heads = fields.model, fields.per_layer("attention.head_count_kv")
    if window(fields):
        raise model.fail(f"windows in the architecture {model.architecture} are not supported")
    convolutions = (f"blk.{layer}.shortconv.conv.bias" for layer in range(len(heads)))
    return {
        **named("Lfm2", "lfm2"),
        "layer_types": ["full_attention" if count else "conv" for count in heads],
        "conv_L_cache": fields.integer("shortconv.l_cache"),
        "conv_bias": any(bias in model.tensors for bias in convolutions),
        "block_auto_adjust_ff_dim": False,
        "norm_eps": config["rms_norm_eps"],
    }


def lfm2_moe(fields: Fields, config: Config) -> Config:
    """Returns the fields of LFM2 with experts."""
    if fields.integer("expert_gating_func", _SIGMOID) != _SIGMOID:
        raise fields.model.fail("experts that are not chosen by sigmoids are not supported in the architecture lfm2moe")
    first = fields.integer("leading_dense_block_count", 0)
    experts = {
        "num_experts": fields.integer("expert_count"),
        "num_experts_per_tok": fields.integer("expert_used_count"),
        "moe_intermediate_size": fields.integer("expert_feed_forward_length"),
        "num_dense_layers": first,
        "norm_topk_prob": True,
        "use_expert_bias": f"blk.{first}.exp_probs_b.bias" in fields.model.tensors,
        "routed_scaling_factor": fields.number("expert_weights_scale", 1.0),
    }
    return {**lfm2(fields, config), **named("Lfm2Moe", "lfm2_moe"), **experts}


def qwen3_5(fields: Fields, config: Config) -> Config:
    """Qwen 3.5: most layers have a gated delta rule, which the file describes with the fields of a state space."""
    heads, inner = fields.integer("ssm.time_step_rank"), fields.integer("ssm.inner_size")
    if heads < 1 or inner % heads:
        raise fields.model.fail(f"{fields.name('ssm.inner_size')} is {inner}, which are not {heads} heads")
    if fields.has("attention.recurrent_layers"):
        recurrent = fields.per_layer("attention.recurrent_layers")
    else:
        interval = fields.integer("full_attention_interval", _INTERVAL)
        recurrent = [(layer + 1) % interval for layer in range(fields.num_layers)]
    return {
        **named("Qwen3_5", "qwen3_5_text"),
        "layer_types": ["linear_attention" if each else "full_attention" for each in recurrent],
        "linear_num_key_heads": fields.integer("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_key_head_dim": fields.integer("ssm.state_size"),
        "linear_value_head_dim": inner // heads,
        "linear_conv_kernel_dim": fields.integer("ssm.conv_kernel"),
        "partial_rotary_factor": config.get("partial_rotary_factor", 1.0),
    }


def qwen3_5_moe(fields: Fields, config: Config) -> Config:
    """Returns the fields of Qwen 3.5 with experts."""
    experts = {
        "num_experts": fields.integer("expert_count"),
        "num_experts_per_tok": fields.integer("expert_used_count"),
        "moe_intermediate_size": fields.integer("expert_feed_forward_length"),
        "shared_expert_intermediate_size": fields.integer("expert_shared_feed_forward_length"),
        "norm_topk_prob": True,
    }
    return {**qwen3_5(fields, config), **named("Qwen3_5Moe", "qwen3_5_moe_text"), **experts}


def qwen3_next(fields: Fields, config: Config) -> Config:
    """Qwen3-Next: in newer files queries, keys and values are apart from the gates, as in Qwen 3.5."""
    split = not any(name.endswith(f".{JOINED}") for name in fields.model.tensors)
    return {**qwen3_5_moe(fields, config), **named("Qwen3Next", "qwen3_next"), "split_projections": split}


def kimi_linear(fields: Fields, config: Config) -> Config:
    """Kimi Linear: layers without key heads have a delta rule, the others latents, of which the file has one head."""
    if fields.integer("expert_gating_func", _SIGMOID) != _SIGMOID:
        raise fields.model.fail("experts that are not chosen by sigmoids are not supported in this architecture")
    heads, rope_dim = fields.per_layer("attention.head_count_kv"), fields.integer("rope.dimension_count")
    return {
        **named("KimiLinear", "kimi_linear"),
        "layer_types": ["full_attention" if count else "linear_attention" for count in heads],
        "num_key_value_heads": config["num_attention_heads"],
        "intermediate_size": fields.integer("feed_forward_length"),
        "linear_head_dim": fields.integer("kda.head_dim"),
        "linear_num_heads": config["num_attention_heads"],
        "linear_conv_kernel_dim": fields.integer("ssm.conv_kernel"),
        "q_lora_rank": None,
        "kv_lora_rank": fields.integer("attention.kv_lora_rank"),
        "qk_rope_head_dim": rope_dim,
        "qk_nope_head_dim": fields.integer("attention.key_length_mla") - rope_dim,
        "v_head_dim": fields.integer("attention.value_length_mla"),
        "num_experts": fields.integer("expert_count"),
        "num_experts_per_token": fields.integer("expert_used_count"),
        "moe_intermediate_size": fields.integer("expert_feed_forward_length"),
        "num_shared_experts": fields.integer("expert_shared_count"),
        "first_k_dense_replace": fields.integer("leading_dense_block_count", 0),
        "routed_scaling_factor": fields.number("expert_weights_scale", 1.0),
        "moe_renormalize": True,
        "num_expert_group": fields.integer("expert_group_count", 1),
        "topk_group": fields.integer("expert_group_used_count", 1),
    }
