"""What llama.cpp's converter makes of newer families: metadata, and tensors that it changes, with the way back."""

import re
from collections.abc import Callable
from statistics import NormalDist
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Parts = tuple[dict[str, Array], Callable[[dict[str, Array]], Array]]
"""Tensors of the file by name, and what makes the model's tensor of them again."""
NEMOTRON = ("nemotron_h", "nemotron_h_moe")
DELTA = ("qwen35", "qwen35moe", "qwen3next")


def complete(config: dict[str, Any]) -> None:
    """Adds the usual names of fields that a family has by other names."""
    if config["model_type"] == "kimi_linear":
        config["max_position_embeddings"] = config["model_max_length"]
        config["num_experts_per_tok"] = config["num_experts_per_token"]


def add_config(writer: gguf.GGUFWriter, config: dict[str, Any], architecture: str) -> None:
    """The fields that these families have besides the others', or otherwise."""
    if architecture in DELTA:
        values, width = config["linear_num_value_heads"], config["linear_value_head_dim"]
        writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
        writer.add_ssm_state_size(config["linear_key_head_dim"])
        writer.add_ssm_group_count(config["linear_num_key_heads"])
        writer.add_ssm_time_step_rank(values)
        writer.add_ssm_inner_size(values * width)
        recurrent = [kind == "linear_attention" for kind in config["layer_types"]]
        recurrent += [False] * config.get("num_draft_layers", 0)
        writer.add_array(f"{architecture}.attention.recurrent_layers", recurrent)
        writer.add_full_attention_interval(config.get("full_attention_interval", 4))
    if architecture == "gemma3n":
        _add_gemma3n(writer, config)
    if architecture == "gemma4":
        _add_gemma4(writer, config)
    if architecture == "granitehybrid":
        _add_granite(writer, config)
    if architecture in NEMOTRON:
        _add_nemotron(writer, config)
    if architecture in ("mamba", "mamba2"):
        _add_mamba(writer, config)
    if architecture == "falcon-h1":
        heads, inner = config["mamba_n_heads"], config["mamba_d_ssm"]
        sizes = (config["mamba_d_state"], config["mamba_n_groups"], config["mamba_d_conv"])
        _add_state_space(writer, heads, inner, *sizes)
    if architecture == "jamba":
        count, period, offset = (
            config[name] for name in ("num_hidden_layers", "attn_layer_period", "attn_layer_offset")
        )
        attends = [layer % period == offset for layer in range(count)]
        writer.add_head_count_kv([config["num_key_value_heads"] * one for one in attends])
        writer.add_ssm_inner_size(config["mamba_expand"] * config["hidden_size"])
        writer.add_ssm_state_size(config["mamba_d_state"])
        writer.add_ssm_time_step_rank(config["mamba_dt_rank"])
        writer.add_ssm_conv_kernel(config["mamba_d_conv"])
    if architecture == "kimi-linear":
        _add_kimi(writer, config)
    if architecture == "llama4":
        writer.add_interleave_moe_layer_step(config["interleave_moe_layer_step"])
        writer.add_expert_feed_forward_length(config["intermediate_size"])


def _add_kimi(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    rank, rope_dim = config["kv_lora_rank"], config["qk_rope_head_dim"]
    writer.add_head_count_kv([int(kind == "full_attention") for kind in config["layer_types"]])
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_kda_head_dim(config["linear_head_dim"])
    writer.add_kv_lora_rank(rank)
    writer.add_rope_dimension_count(rope_dim)
    writer.add_key_length(rank + rope_dim)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + rope_dim)
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_expert_shared_count(config["num_shared_experts"])
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_expert_group_count(config["num_expert_group"])
    writer.add_expert_group_used_count(config["topk_group"])


def _add_mamba(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_context_length(2**20)
    writer.add_layer_norm_rms_eps(config["layer_norm_epsilon"])
    for zero in (writer.add_feed_forward_length, writer.add_head_count):
        zero(0)
    if "num_heads" in config:
        inner = config["num_heads"] * config["head_dim"]
        _add_state_space(
            writer, config["num_heads"], inner, config["state_size"], config["n_groups"], config["conv_kernel"]
        )
        return
    writer.add_ssm_inner_size(config["intermediate_size"])
    writer.add_ssm_state_size(config["state_size"])
    writer.add_ssm_time_step_rank(config["time_step_rank"])
    writer.add_ssm_conv_kernel(config["conv_kernel"])
    writer.add_ssm_dt_b_c_rms(config["model_type"] == "falcon_mamba")


def _add_granite(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    heads, attends = config["mamba_n_heads"], [kind == "full_attention" for kind in config["layer_types"]]
    writer.add_head_count_kv([config["num_key_value_heads"] * one for one in attends])
    writer.add_rope_scaling_finetuned(config["position_embedding_type"] == "rope")
    writer.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])
    sizes = (heads, heads * config["mamba_d_head"], config["mamba_d_state"])
    _add_state_space(writer, *sizes, config["mamba_n_groups"], config["mamba_d_conv"])


def _add_nemotron(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    kinds, heads = config["layers_block_type"], config["mamba_num_heads"]
    drafts = ["both"] * config.get("num_draft_layers", 0)
    attends = [kind in ("full_attention", "both") for kind in (*kinds, *drafts)]
    writer.add_head_count_kv([config["num_key_value_heads"] * one for one in attends])
    experts = "moe" in kinds
    width = config["moe_intermediate_size"] if experts else config["intermediate_size"]
    writer.add_feed_forward_length([width * (kind in ("mlp", "moe", "both")) for kind in (*kinds, *drafts)])
    writer.add_layer_norm_eps(config["layer_norm_epsilon"])
    sizes = (heads, heads * config["mamba_head_dim"], config["ssm_state_size"])
    _add_state_space(writer, *sizes, config["n_groups"], config["conv_kernel"])
    if experts:
        writer.add_expert_count(config["n_routed_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_shared_feed_forward_length(config["moe_shared_expert_intermediate_size"])
        writer.add_expert_weights_norm(config["norm_topk_prob"])
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])
        if config["moe_latent_size"]:
            writer.add_moe_latent_size(config["moe_latent_size"])


def _add_state_space(writer: gguf.GGUFWriter, heads: int, inner: int, state: int, groups: int, kernel: int) -> None:
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_inner_size(inner)
    writer.add_ssm_state_size(state)
    writer.add_ssm_group_count(groups)
    writer.add_ssm_conv_kernel(kernel)


def _add_gemma4(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    slides = [kind == "sliding_attention" for kind in config["layer_types"]]
    own = next(iter(config["per_layer_config"].values()))
    near, wide = config["num_key_value_heads"], own["head_dim"]
    if own.get("num_key_value_heads", near) != near:
        writer.add_head_count_kv([near if slid else own["num_key_value_heads"] for slid in slides])
    shared, count, width = config["num_kv_shared_layers"], len(slides), config["intermediate_size"]
    if config["use_double_wide_mlp"]:
        writer.add_feed_forward_length([width * (1 + (layer >= count - shared)) for layer in range(count)])
    writer.add_shared_kv_layers(shared)
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    writer.add_sliding_window_pattern(slides)
    writer.add_key_length(wide)
    writer.add_value_length(wide)
    writer.add_key_length_swa(config["head_dim"])
    writer.add_value_length_swa(config["head_dim"])
    writer.add_rope_dimension_count(wide)
    writer.add_rope_dimension_count_swa(config["head_dim"])
    rope = config["rope_parameters"]
    writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
    if config["final_logit_softcapping"]:
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    turned = int(wide * rope["full_attention"]["partial_rotary_factor"] / 2)
    divisors = [1.0] * turned + [1e30] * (wide // 2 - turned)
    writer.add_tensor("rope_freqs.weight", np.array(divisors, dtype=np.float32))


def _add_gemma3n(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_altup_active_idx(config["altup_active_idx"])
    writer.add_altup_num_inputs(config["altup_num_inputs"])
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    writer.add_shared_kv_layers(config["num_kv_shared_layers"])
    shares = config["activation_sparsity_pattern"]
    writer.add_activation_sparsity_scale([NormalDist().inv_cdf(share) if share else -np.inf for share in shares])
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    writer.add_rope_freq_base_swa(config["rope_parameters"]["sliding_attention"]["rope_theta"])
    writer.add_final_logit_softcapping(config["final_logit_softcapping"])


def _gemma3n(name: str, array: Array, config: dict[str, Any]) -> Parts | None:
    if not name.endswith("altup.correct_output_scale"):
        return None
    return _one(f"blk.{name.split('.')[2]}.altup_correct_scale.weight", array, lambda x: x)


_DRAFT = {
    "mtp.fc": "nextn.eh_proj",
    "mtp.pre_fc_norm_embedding": "nextn.enorm",
    "mtp.pre_fc_norm_hidden": "nextn.hnorm",
    "mtp.norm": "nextn.shared_head_norm",
    "mtp.layers.0.eh_proj": "nextn.eh_proj",
    "mtp.layers.0.enorm": "nextn.enorm",
    "mtp.layers.0.hnorm": "nextn.hnorm",
    "mtp.layers.1.norm": "post_attention_norm",
    "mtp.layers.1.final_layernorm": "nextn.shared_head_norm",
}


def as_layer(name: str, number: int, architecture: str) -> str:
    """The name of a draft layer's tensor as that of another layer, behind `number` ones."""
    stem = name.removesuffix(".weight")
    if stem in _DRAFT:
        return f"blk.{number}.{_DRAFT[stem]}.weight"
    first = "backbone" if architecture in NEMOTRON else "model"
    return re.sub(r"mtp\.layers\.\d", f"{first}.layers.{number}", name)


def parts(name: str, array: Array, config: dict[str, Any], architecture: str) -> Parts | None:
    """The tensors that the converter makes of a tensor; None if it changes it as in other families."""
    if name.startswith("blk."):
        more = np.float32(architecture in DELTA and name.endswith("norm.weight"))
        return _one(name, array + more, lambda x: x - more)
    if architecture == "falcon-h1":
        return _falcon_h1(name, array, config)
    for families, inside, found in _CHANGED:
        if architecture in families and inside in name:
            return found(name, array, config)
    return None


def _gemma4(name: str, array: Array, config: dict[str, Any]) -> Parts | None:
    theirs = _GEMMA4.get(name.partition(".layers.")[2].partition(".")[2])
    return None if theirs is None else _one(f"blk.{name.split('.')[2]}.{theirs}", array, lambda x: x)


_GEMMA4 = {
    "layer_scalar": "layer_output_scale.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
}


def _one(name: str, forth: Array, back: Callable[[Array], Array]) -> Parts:
    return {name: forth}, lambda stored: back(stored[name])


def _delta(name: str, array: Array, config: dict[str, Any]) -> Parts:
    layer, stem = name.split(".")[2], name.partition(".linear_attn.")[2].removesuffix(".weight")
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    key_dim, value_dim = config["linear_key_head_dim"], config["linear_value_head_dim"]
    heads = np.arange(values).reshape(keys, -1).T.ravel() if config["model_type"] != "qwen3_next" else np.arange(values)
    order = {1: heads, value_dim: (heads[:, None] * value_dim + np.arange(value_dim)).ravel()}
    before = 2 * keys * key_dim
    behind = np.concatenate([np.arange(before), before + order[value_dim]])
    blk = f"blk.{layer}."
    if stem == "A_log":
        return _one(f"{blk}ssm_a", -np.exp(array)[heads], lambda a: np.log(-a[np.argsort(heads)]))
    if stem == "conv1d":
        return _one(f"{blk}ssm_conv1d.weight", array[:, 0][behind], lambda x: x[np.argsort(behind)][:, None])
    if stem == "out_proj":
        columns = order[value_dim]
        return _one(f"{blk}ssm_out.weight", array[:, columns], lambda x: x[:, np.argsort(columns)])
    if stem == "in_proj_qkvz" and config["as_older"]:
        return _one(f"{blk}ssm_in.weight", array, lambda x: x)
    if stem == "in_proj_qkvz":
        return _split(blk, array, (keys, key_dim, values // keys * value_dim))
    names = {
        "in_proj_qkv": ("attn_qkv.weight", behind),
        "in_proj_z": ("attn_gate.weight", order[value_dim]),
        "in_proj_b": ("ssm_beta.weight", heads),
        "in_proj_a": ("ssm_alpha.weight", heads),
        "in_proj_ba": ("ssm_ba.weight", np.arange(2 * values)),
        "dt_bias": ("ssm_dt.bias", heads),
        "norm": ("ssm_norm.weight", np.arange(value_dim)),
    }
    theirs, rows = names[stem]
    return _one(blk + theirs, array[rows], lambda x: x[np.argsort(rows)])


def _split(blk: str, array: Array, sizes: tuple[int, int, int]) -> Parts:
    """Qwen3-Next: the rows of each key head are its query, key, values and gates, in the file they are apart."""
    keys, key_dim, inner = sizes
    grouped = array.reshape(keys, -1, array.shape[-1])
    pieces = np.split(grouped, np.cumsum([key_dim, key_dim, inner]), axis=1)
    queries, key_rows, values, gates = (piece.reshape(-1, array.shape[-1]) for piece in pieces)

    def back(stored: dict[str, Array]) -> Array:
        joined = stored[f"{blk}attn_qkv.weight"]
        q, k, v = np.split(joined, [keys * key_dim, 2 * keys * key_dim])
        parts = (q, k, v, stored[f"{blk}attn_gate.weight"])
        return np.concatenate([part.reshape(keys, -1, array.shape[-1]) for part in parts], axis=1).reshape(array.shape)

    joined = np.concatenate([queries, key_rows, values])
    return {f"{blk}attn_qkv.weight": joined, f"{blk}attn_gate.weight": gates}, back


def _kimi(name: str, array: Array, config: dict[str, Any]) -> Parts | None:
    """Of each head, the matrix behind latents has rows of keys and of values, which are apart in a file."""
    blk, stem = f"blk.{name.split('.')[2]}.", name.split(".", 4)[-1]
    if stem == "A_log":
        return _one(f"{blk}ssm_a", -np.exp(array), lambda a: np.log(-a))
    if stem == "dt_bias":
        return _one(f"{blk}ssm_dt.bias", array, lambda x: x)
    if stem == "gate.e_score_correction_bias":
        return _one(f"{blk}exp_probs_b.bias", array, lambda x: x)
    if stem.endswith("_conv1d.weight"):
        theirs = array.reshape(1, len(array), 1, -1)
        return _one(f"{blk}ssm_conv1d_{stem[0]}.weight", theirs, lambda x: x.reshape(array.shape))
    if stem != "kv_b_proj.weight" or config["as_older"]:
        return None
    heads = array.reshape(config["num_attention_heads"], -1, array.shape[-1])
    keys, values = np.split(heads, [config["qk_nope_head_dim"]], axis=1)
    first, second = f"{blk}attn_k_b.weight", f"{blk}attn_v_b.weight"

    def back(stored: dict[str, Array]) -> Array:
        return np.concatenate([stored[first].swapaxes(1, 2), stored[second]], axis=1).reshape(array.shape)

    return {first: keys.swapaxes(1, 2), second: values}, back


def _llama4(name: str, array: Array, config: dict[str, Any]) -> Parts:
    """Experts have their rows in a file, gates apart from ups, and in the model their columns."""
    layer, rows = name.split(".")[2], np.swapaxes(array, -1, -2)
    if name.endswith("down_proj"):
        return _one(f"blk.{layer}.ffn_down_exps.weight", rows, lambda x: np.swapaxes(x, -1, -2))
    gate, up = (f"blk.{layer}.ffn_{part}_exps.weight" for part in ("gate", "up"))
    first, second = np.split(rows, 2, axis=1)
    joined = lambda stored: np.concatenate([stored[gate], stored[up]], axis=1)  # noqa: E731
    return {gate: first, up: second}, lambda stored: np.swapaxes(joined(stored), -1, -2)


def _falcon_h1(name: str, array: Array, config: dict[str, Any]) -> Parts | None:
    """The matrices of a file include the factors."""
    stem = name.split(".", 3)[-1]
    inside = _state_space(name, array, config) if ".mamba." in name else None
    if inside is not None:
        return inside
    if stem == "pre_ff_layernorm.weight":
        return _one(f"blk.{name.split('.')[2]}.ffn_norm", array, lambda x: x)
    into, (gate, down) = config["attention_in_multiplier"], config["mlp_multipliers"]
    inner, shared = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
    rows = np.repeat(config["ssm_multipliers"], [inner, inner, shared, shared, config["mamba_n_heads"]])
    theirs, factor = {
        "model.embed_tokens.weight": ("token_embd", config["embedding_multiplier"]),
        "lm_head.weight": ("output", config["lm_head_multiplier"]),
        "self_attn.q_proj.weight": ("attn_q", into),
        "self_attn.k_proj.weight": ("attn_k", into * config["key_multiplier"]),
        "self_attn.v_proj.weight": ("attn_v", into),
        "self_attn.o_proj.weight": ("attn_output", config["attention_out_multiplier"]),
        "feed_forward.gate_proj.weight": ("ffn_gate", gate),
        "feed_forward.down_proj.weight": ("ffn_down", down),
        "mamba.in_proj.weight": ("ssm_in", (rows * config["ssm_in_multiplier"])[:, None]),
        "mamba.out_proj.weight": ("ssm_out", config["ssm_out_multiplier"]),
    }.get(name if not name.startswith("model.layers.") else stem, ("", 1.0))
    if not theirs:
        return None
    blk, factor = f"blk.{name.split('.')[2]}." if ".layers." in name else "", np.float32(factor)
    return _one(f"{blk}{theirs}.weight", array * factor, lambda x: x / factor)


def _granite(name: str, array: Array, config: dict[str, Any]) -> Parts | None:
    """Gates and ups are apart in a file, and without experts what the model calls the shared MLP is the MLP."""
    layer, stem = name.split(".")[2], name.partition(".layers.")[2].partition(".")[2].removesuffix(".weight")
    end = "_shexp" if config["num_local_experts"] else ""
    pair = {"shared_mlp.input_linear": end, "block_sparse_moe.input_linear": "_exps"}.get(stem)
    if stem == "shared_mlp.output_linear":
        return _one(f"blk.{layer}.ffn_down{end}.weight", array, lambda x: x)
    if pair is None:
        return None
    gate, up = (f"blk.{layer}.ffn_{part}{pair}.weight" for part in ("gate", "up"))
    first, second = np.split(array, 2, axis=-2)
    return {gate: first, up: second}, lambda stored: np.concatenate([stored[gate], stored[up]], axis=-2)


def _state_space(name: str, array: Array, config: dict[str, Any]) -> Parts | None:
    """Those of Mamba 1 have no groups."""
    blk, stem = f"blk.{name.split('.')[2]}.", re.split(r"\.(?:mixer|mamba)\.", name)[1]
    groups = config.get("n_groups", config.get("mamba_n_groups", 0))
    if stem == "gate.e_score_correction_bias":
        return _one(f"{blk}exp_probs_b.bias", array, lambda x: x)
    if stem == "A_log" and array.ndim > 1:
        return _one(f"{blk}ssm_a", -np.exp(array), lambda a: np.log(-a))
    if stem == "A_log":
        return _one(f"{blk}ssm_a", -np.exp(array)[:, None], lambda a: np.log(-a[:, 0]))
    if stem == "D" and groups == 0:
        return _one(f"{blk}ssm_d", array, lambda x: x)
    if stem == "D":
        return _one(f"{blk}ssm_d", array[:, None], lambda x: x[:, 0])
    if stem == "dt_bias":
        return _one(f"{blk}ssm_dt.bias", array, lambda x: x)
    if stem == "norm.weight":
        return _one(f"{blk}ssm_norm.weight", array.reshape(groups, -1), lambda x: x.ravel())
    if stem == "conv1d.weight":
        return _one(f"{blk}ssm_conv1d.weight", array[:, 0], lambda x: x[:, None])
    return None


_CHANGED: tuple[tuple[tuple[str, ...], str, Callable[[str, Array, dict[str, Any]], Parts | None]], ...] = (
    (DELTA, ".linear_attn.", _delta),
    (("gemma3n",), "", _gemma3n),
    (("gemma4",), "", _gemma4),
    (("granitehybrid", "jamba"), ".mamba.", _state_space),
    (("granitehybrid",), ".layers.", _granite),
    (("kimi-linear",), ".layers.", _kimi),
    (("llama4",), ".experts.", _llama4),
    (("mamba", "mamba2", *NEMOTRON), ".mixer.", _state_space),
)
"""Architectures, a part of a tensor's name, and what the converter makes of such tensors; the first one that fits."""
