"""Makes the fields of config.json that Gemma has besides Llama's. Called by `config`."""

from statistics import NormalDist

from antiphon.shared.models.gguf_model.fields import GELU, Config, Fields, named

_GEMMA2_27B_LAYERS, _GEMMA3_27B_LAYERS = 46, 62
_GEMMA3_PATTERN = 6
_HUGE = 1e29
"""Divisors of positions from which on a pair of numbers is not rotated; llama.cpp's converter writes 1e30."""


def gemma2(fields: Fields, config: Config) -> Config:
    """Returns the fields of Gemma 2."""
    caps = {
        "attn_logit_softcapping": fields.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": fields.number("final_logit_softcapping", 30.0),
    }
    window = {"sliding_window": fields.integer("attention.sliding_window", 4096)}
    return {**named("Gemma2"), **GELU, **caps, **window, **_query_scalar(config, _GEMMA2_27B_LAYERS)}


def gemma3(fields: Fields, config: Config) -> Config:
    """Returns the fields of Gemma 3."""
    window = {
        "sliding_window": fields.integer("attention.sliding_window"),
        "sliding_window_pattern": _GEMMA3_PATTERN,
        "rope_local_base_freq": fields.number("rope.freq_base_swa", 10_000.0),
        "rope_theta": fields.number("rope.freq_base", 1_000_000.0),
    }
    return {**named("Gemma3", "gemma3_text"), **GELU, **window, **_query_scalar(config, _GEMMA3_27B_LAYERS)}


def gemma3n(fields: Fields, config: Config) -> Config:
    """Gemma 3n: the sizes of some parts are those of their tensors."""
    if fields.integer("altup.active_idx", 0):
        raise fields.model.fail("layers that compute with another stream than the first are not supported")
    slides = fields.per_layer("attention.sliding_window_pattern")
    rows = {}
    for field, name in (("vocab_size_per_layer_input", "per_layer_token_embd"), ("laurel_rank", "blk.0.laurel_l")):
        if (tensor := fields.model.tensors.get(f"{name}.weight")) is None:
            raise fields.model.fail(f"the tensor {name}.weight is missing")
        rows[field] = tensor.shape[0]
    cuts = fields.numbers("activation_sparsity_scale")  # in deviations; the converter writes minus infinity for none
    return {
        **named("Gemma3n", "gemma3n_text"),
        **GELU,
        **rows,
        "num_key_value_heads": fields.integer("attention.head_count_kv", config["num_attention_heads"]),
        "intermediate_size": fields.each("feed_forward_length"),
        "num_kv_shared_layers": fields.integer("attention.shared_kv_layers"),
        "layer_types": ["sliding_attention" if slid else "full_attention" for slid in slides],
        "sliding_window": fields.integer("attention.sliding_window"),
        "hidden_size_per_layer_input": fields.integer("embedding_length_per_layer_input"),
        "altup_num_inputs": fields.integer("altup.num_inputs"),
        "activation_sparsity_pattern": [NormalDist().cdf(cut) for cut in cuts],
        "final_logit_softcapping": fields.number("final_logit_softcapping", 30.0),
        "rope_local_base_freq": fields.number("rope.freq_base_swa", 10_000.0),
        "rope_theta": fields.number("rope.freq_base", 1_000_000.0),
    }


def gemma4(fields: Fields, config: Config) -> Config:
    """Gemma 4: layers that see all tokens have key heads, widths of heads and positions of their own."""
    slides = fields.per_layer("attention.sliding_window_pattern")
    heads = fields.each("attention.head_count_kv", config["num_attention_heads"])
    near = {count for count, slid in zip(heads, slides, strict=True) if slid}
    if len(near) > 1:
        raise fields.model.fail(f"layers with windows that differ in {fields.name('attention.head_count_kv')}")
    width = fields.integer("attention.key_length_swa", config["head_dim"])
    if fields.integer("rope.dimension_count_swa", width) != width:
        raise fields.model.fail("heads of layers with windows that are rotated in part are not supported")
    all_tokens = [layer for layer, slid in enumerate(slides) if not slid]
    wide = config["head_dim"]
    if fields.integer("attention.value_length", wide) != wide:
        raise fields.model.fail("keys and values of different sizes are not supported")
    inputs = fields.integer("embedding_length_per_layer_input", 0)
    table = fields.model.tensors.get("per_layer_token_embd.weight")
    caps = "final_logit_softcapping"
    return {
        **named("Gemma4", "gemma4_text"),
        **GELU,
        **({caps: fields.number(caps)} if fields.has(caps) else {}),
        **_widths(fields),
        "layer_types": ["sliding_attention" if slid else "full_attention" for slid in slides],
        "sliding_window": fields.integer("attention.sliding_window"),
        "head_dim": width,
        "num_key_value_heads": near.pop() if near else heads[0],
        "per_layer_config": {
            str(layer): {"head_dim": wide, "num_key_value_heads": heads[layer]} for layer in all_tokens
        },
        "attention_k_eq_v": not any(f"blk.{layer}.attn_v.weight" in fields.model.tensors for layer in all_tokens),
        "hidden_size_per_layer_input": inputs,
        **({} if table is None else {"vocab_size_per_layer_input": table.shape[0]}),
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": _rotated(fields, wide // 2),
                "rope_theta": fields.number("rope.freq_base", 1_000_000.0),
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": fields.number("rope.freq_base_swa", 10_000.0)},
        },
        **(_experts(fields) if fields.integer("expert_count", 0) else {}),
    }


def _widths(fields: Fields) -> Config:
    """Returns the width of MLPs, twice as large in layers that read the keys of others, and the number of these."""
    shared, widths = fields.integer("attention.shared_kv_layers", 0), fields.each("feed_forward_length")
    doubled = [widths[0]] * (len(widths) - shared) + [2 * widths[0]] * shared
    if widths not in (doubled, [widths[0]] * len(widths)):
        raise fields.model.fail(f"layers that differ in {fields.name('feed_forward_length')} in another way")
    twice = {"use_double_wide_mlp": shared > 0 and widths == doubled}
    return {"intermediate_size": widths[0], "num_kv_shared_layers": shared, **twice}


def _rotated(fields: Fields, pairs: int) -> float:
    """Returns the part of a head that is rotated: those of the `pairs` numbers whose divisor is not huge."""
    tensor = fields.model.tensors.get("rope_freqs.weight")
    if tensor is None:
        return 1.0
    divisors = [float(each) for each in tensor.data.tolist()] if tensor.type == "F32" else []
    turned = divisors.count(1.0)
    if (
        divisors != [1.0] * turned + divisors[turned:]
        or len(divisors) != pairs
        or min(divisors[turned:] or [_HUGE]) < _HUGE
    ):
        raise fields.model.fail("rope_freqs.weight is not that of a head that is rotated in part")
    return turned / pairs


def _experts(fields: Fields) -> Config:
    return {
        "enable_moe_block": True,
        "num_experts": fields.integer("expert_count"),
        "top_k_experts": fields.integer("expert_used_count"),
        "moe_intermediate_size": fields.integer("expert_feed_forward_length"),
    }


def _query_scalar(config: Config, largest: int) -> Config:
    """Returns the scale parameter of attention scores.

    In the model with 27 billion parameters it is not the head size.
    """
    if config["num_hidden_layers"] == largest:
        return {"query_pre_attn_scalar": config["hidden_size"] // config["num_attention_heads"]}
    return {"query_pre_attn_scalar": config["head_dim"]}
