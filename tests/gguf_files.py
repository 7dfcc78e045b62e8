"""Writes models as GGUF files with the package `gguf`, as llama.cpp's converter does, each beside what it stands for.

`write_gguf` gives the plain float32 model, whose weights are what the package's own `dequantize` makes of the blocks.
"""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from tests import gguf_parts

Array = NDArray[Any]
Kind = gguf.GGMLQuantizationType
ARCHITECTURES = {
    "llama": "llama", "mistral": "llama", "mixtral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "phi3": "phi3",
    "arcee": "arcee", "granite": "granite", "ministral3": "mistral3", "olmoe": "olmoe",
    "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "gemma": "gemma", "gemma2": "gemma2", "gemma3_text": "gemma3",
    "lfm2": "lfm2", "lfm2_moe": "lfm2moe",
    "gemma3n_text": "gemma3n", "gemma4_text": "gemma4", "granitemoehybrid": "granitehybrid",
    "nemotron_h": "nemotron_h", "nemotron_h with experts": "nemotron_h_moe",
    "mamba": "mamba", "falcon_mamba": "mamba", "mamba2": "mamba2", "falcon_h1": "falcon-h1", "jamba": "jamba",
    "llama4_text": "llama4", "kimi_linear": "kimi-linear",
    "qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe", "qwen3_next": "qwen3next",
}  # fmt: skip
PLUS_ONE = ("gemma", "gemma2", "gemma3", "qwen35", "qwen35moe", "qwen3next")
"""Architectures whose norms have a 1 added in a file."""
INTERLEAVED = ("llama", "arcee", "granite", "mistral3", "granitehybrid", "nemotron_h", "nemotron_h_moe")
PLAIN = (Kind.F32, Kind.F16, Kind.BF16)
_EXPERT = re.compile(r"(.*)\.experts\.(\d+)\.(.*)")
_NUMBERED = re.compile(r"model\.(altup_\w+)\.(\d+)\.weight")
"""Matrices of which a file has all in one tensor."""
_STACKED = {"w1": "ffn_gate_exps", "w2": "ffn_down_exps", "w3": "ffn_up_exps"}
_STACKED |= {f"{part}_proj": f"ffn_{part}_exps" for part in ("gate", "up", "down")}
_HALF_OFFSETS = {Kind.Q2_K: (80, 82), Kind.Q3_K: (108,), Kind.Q4_K: (0, 2), Kind.Q5_K: (0, 2), Kind.Q6_K: (208,)}
_HALF_OFFSETS |= {Kind.IQ4_NL: (0,)}


def architecture_of(config: dict[str, Any]) -> str:
    """The architecture of a model's file; empty if it is not served in this format."""
    kind = config.get("model_type", "")
    with_experts = "moe" in (config.get("layers_block_type") or ())
    return ARCHITECTURES.get(f"{kind} with experts" if with_experts else kind, "")


def write_gguf(
    model: Path,
    path: Path,
    kind: Kind | Callable[[str], Kind] = Kind.F32,
    change: Callable[[gguf.GGUFWriter], None] | None = None,
    *,
    as_older: bool = False,
    fused: bool = False,
    **fields: Any,
) -> Path:
    """Writes a model directory of `tests.models` as a file, and the plain model to a directory beside it.

    `kind` is that of the matrices, or gives that of a tensor; rows that are not whole blocks stay F32. `fields` are
    further fields of the architecture. `as_older`: Qwen3-Next's projections in one tensor, as older files have them;
    `fused`: gates and ups of experts in one tensor, as the converter writes them on demand. Gives the directory of the
    plain model back.
    """
    config = json.loads((model / "config.json").read_text())
    architecture = architecture_of(config)
    config |= {"as_older": as_older, "fused": fused}
    gguf_parts.complete(config)
    config.setdefault("num_hidden_layers", len(config.get("layers_block_type", ())))
    writer = gguf.GGUFWriter(path, architecture)
    tensors = {name: tensor.float().numpy() for name, tensor in load_file(model / "model.safetensors").items()}
    if any(name.startswith("mtp.") for name in tensors):
        config["num_draft_layers"] = 1
        writer.add_nextn_predict_layers(1)
    if architecture.startswith("lfm2"):
        _add_convolutions(writer, config, len(tensors["model.layers.0.feed_forward.w1.weight"]))
    _add_config(writer, config, architecture)
    add_tokenizer(writer, model, config["vocab_size"])
    for name, value in fields.items():
        {float: writer.add_float32, int: writer.add_uint32, str: writer.add_string}[type(value)](
            f"{architecture}.{name.replace('__', '.')}", value
        )
    if change is not None:
        change(writer)
    plain = _add_tensors(writer, tensors, config, architecture, kind if callable(kind) else lambda _: kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    directory = path.with_suffix("")
    shutil.copytree(model, directory)
    contiguous = {name: torch.from_numpy(np.array(array, order="C")) for name, array in plain.items()}
    save_file(contiguous, directory / "model.safetensors", {"format": "pt"})
    return directory


def _add_convolutions(writer: gguf.GGUFWriter, config: dict[str, Any], width: int) -> None:
    """What files of LFM2 have besides, and changes `config` where they have other values. `width`: that of the MLPs."""
    heads = config["num_key_value_heads"]
    config["num_key_value_heads"] = [0 if kind == "conv" else heads for kind in config["layer_types"]]
    config["rms_norm_eps"], config["intermediate_size"] = config["norm_eps"], width
    writer.add_shortconv_l_cache(config["conv_L_cache"])
    if "num_dense_layers" in config:
        writer.add_leading_dense_block_count(config["num_dense_layers"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_scale(config["routed_scaling_factor"])


def _add_config(writer: gguf.GGUFWriter, config: dict[str, Any], architecture: str) -> None:
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    rope = config.get("rope_parameters") or {}
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"] + config.get("num_draft_layers", 0))
    writer.add_feed_forward_length(config.get("intermediate_size_mlp") or config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1)))
    writer.add_rope_freq_base(rope.get("full_attention", rope).get("rope_theta", 10_000.0))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    _add_positions(writer, rope, head_dim // 2, config)
    if config.get("sliding_window") and architecture not in ("qwen2", "qwen3", "qwen2moe", "qwen3moe"):
        writer.add_sliding_window(config["sliding_window"])
    experts = config.get("num_local_experts") or config.get("num_experts")
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.get("num_experts_per_tok") or config["top_k_experts"])
    if config.get("moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if architecture in ("granite", "granitehybrid"):
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    if architecture == "mistral3":
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    gguf_parts.add_config(writer, config, architecture)
    if "shared_expert_intermediate_size" in config:
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])


def _add_positions(writer: gguf.GGUFWriter, rope: dict[str, Any], pairs: int, config: dict[str, Any]) -> None:
    """Scaled positions. Those of Llama 3 and longrope are tensors: a divisor for each pair."""
    kind = rope.get("rope_type", "default")
    if kind == "llama3":
        frequencies = rope["rope_theta"] ** -(np.arange(pairs) / pairs)
        turns = rope["original_max_position_embeddings"] * frequencies / (2 * np.pi)
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        smooth = ((turns - low) / (high - low)).clip(0, 1)
        divisors = 1 / ((1 - smooth) / rope["factor"] + smooth)
        writer.add_tensor("rope_freqs.weight", divisors.astype(np.float32))
    elif kind == "longrope":
        for name in ("long", "short"):
            writer.add_tensor(f"rope_factors_{name}.weight", np.array(rope[f"{name}_factor"], dtype=np.float32))
        writer.add_rope_scaling_orig_ctx_len(config["original_max_position_embeddings"])
    elif kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
        if kind == "yarn":
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def add_tokenizer(writer: gguf.GGUFWriter, model: Path, size: int) -> None:
    """The tokenizer of a directory, byte-level BPE split by GPT-2's pattern."""
    file = json.loads((model / "tokenizer.json").read_text())
    facts = json.loads((model / "tokenizer_config.json").read_text())
    tokens, kinds = [f"[PAD{i}]" for i in range(size)], [gguf.TokenType.UNUSED] * size
    for text, index in file["model"]["vocab"].items():
        tokens[index], kinds[index] = text, gguf.TokenType.NORMAL
    for added in file["added_tokens"]:
        tokens[added["id"]] = added["content"]
        kinds[added["id"]] = gguf.TokenType.CONTROL if added["special"] else gguf.TokenType.USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in file["model"]["merges"]])
    writer.add_bos_token_id(tokens.index(facts["bos_token"]))
    writer.add_eos_token_id(tokens.index(facts["eos_token"]))
    writer.add_pad_token_id(tokens.index(facts["pad_token"]))
    writer.add_add_bos_token(False)
    writer.add_chat_template(facts["chat_template"])


def _add_tensors(
    writer: gguf.GGUFWriter,
    tensors: dict[str, Array],
    config: dict[str, Any],
    architecture: str,
    kind_of: Callable[[str], Kind],
) -> dict[str, Array]:
    """Adds all tensors and returns what they stand for, by the names of the model directory."""
    enum = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    number = config["num_hidden_layers"]
    names = gguf.get_tensor_name_map(enum, number + 1)
    plain: dict[str, Array] = {}
    stacks: dict[str, list[tuple[int, Array]]] = {}
    for own, array in sorted(tensors.items()):
        name = gguf_parts.as_layer(own, number, architecture)
        if name == "lm_head.weight" and config.get("tie_word_embeddings"):
            plain[own] = array
            continue
        changed = gguf_parts.parts(name, array, config, architecture)
        if changed is not None:
            meanings: dict[str, Array] = {}
            for theirs, part in changed[0].items():
                stored, kind, meanings[theirs] = encoded(part, kind_of(theirs))
                writer.add_tensor(theirs, stored, raw_dtype=kind)
            plain[own] = changed[1](meanings)
            continue
        forth, back = _order(name, array, config, architecture)
        expert, numbered = _EXPERT.fullmatch(name), _NUMBERED.fullmatch(name)
        if numbered is not None:
            theirs = f"{names.get_name(f'model.{numbered[1]}')}.weight"
        elif expert is not None:
            layer = re.findall(r"\d+", name)[0]
            theirs = f"blk.{layer}.{_STACKED[expert[3].removesuffix('.weight')]}.weight"
        else:
            found = names.get_name(name, try_suffixes=(".weight", ".bias"))
            assert found is not None, name
            theirs = f"{found}.bias" if name.endswith("expert_bias") else found
        stored, kind, meaning = encoded(forth(array), kind_of(theirs))
        plain[own] = back(meaning)
        if (one := expert or numbered) is not None:
            stacks.setdefault(theirs, []).append((int(one[2]), stored))
        else:
            stored = stored[0] if "shared_expert_gate" in name and kind == Kind.F32 else stored
            writer.add_tensor(theirs, stored, raw_dtype=kind)
    for theirs, parts in (_fused(stacks) if config["fused"] else stacks).items():
        stack = np.stack([array for _, array in sorted(parts, key=lambda part: part[0])])
        kind = kind_of(theirs)
        writer.add_tensor(theirs, stack, raw_dtype=kind if stack.dtype == np.uint8 or kind == Kind.F16 else Kind.F32)
    return plain


def _fused(stacks: dict[str, list[tuple[int, Array]]]) -> dict[str, list[tuple[int, Array]]]:
    found = {name: parts for name, parts in stacks.items() if "ffn_down" in name}
    for name, gates in stacks.items():
        if "ffn_gate_exps" in name:
            ups = dict(stacks[name.replace("gate", "up")])
            joined = [(expert, np.concatenate([gate, ups[expert]])) for expert, gate in gates]
            found[name.replace("gate", "gate_up")] = joined
    return found


def _order(name: str, array: Array, config: dict[str, Any], architecture: str) -> tuple[Any, Any]:
    """What the converter does to a tensor, and the inverse."""
    same = lambda x: x  # noqa: E731
    if architecture in PLUS_ONE and name.endswith("norm.weight"):
        return (lambda x: x + np.float32(1)), (lambda x: x - np.float32(1))
    if name.endswith("conv.conv.weight"):
        return (lambda x: x.squeeze(1)), (lambda x: x[:, None])
    projection = name.split(".")[-2]
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}.get(projection)
    if architecture not in INTERLEAVED or heads is None:
        return same, same
    pairs = array.shape[0] // heads // 2
    forth = lambda x: x.reshape(heads, 2, pairs, -1).swapaxes(1, 2).reshape(x.shape)  # noqa: E731
    back = lambda x: x.reshape(heads, pairs, 2, -1).swapaxes(1, 2).reshape(x.shape)  # noqa: E731
    return forth, back


def encoded(array: Array, kind: Kind) -> tuple[Array, Kind, Array]:
    """The stored form of an array, its type, and the numbers float32 that it stands for."""
    array = np.ascontiguousarray(array)
    block, _ = gguf.GGML_QUANT_SIZES[kind]
    if array.ndim < 2 or array.shape[-1] % block or kind == Kind.F32:
        return array.astype(np.float32), Kind.F32, array.astype(np.float32)
    if kind == Kind.F16:
        return array.astype(np.float16), kind, array.astype(np.float16).astype(np.float32)
    try:
        stored = gguf.quants.quantize(array, kind)
    except NotImplementedError:
        stored = random_blocks(array, kind)
    return stored, kind, gguf.quants.dequantize(stored, kind)


def random_blocks(array: Array, kind: Kind) -> Array:
    """Random blocks with numbers of about the array's size, for types that the package cannot quantize to."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(array.shape)
    blocks = generator.integers(0, 256, (*array.shape[:-1], array.shape[-1] // block, size), dtype=np.uint8)
    for offset in _HALF_OFFSETS[kind]:
        halves = generator.uniform(0.5, 1, blocks.shape[:-1]).astype(np.float16)
        blocks[..., offset : offset + 2] = halves[..., None].view(np.uint8)
    numbers = gguf.quants.dequantize(blocks.reshape(*array.shape[:-1], -1), kind)
    times = np.float32(np.abs(array).mean() / np.abs(numbers).mean())
    for offset in _HALF_OFFSETS[kind]:
        halves = np.ascontiguousarray(blocks[..., offset : offset + 2]).view(np.float16)
        blocks[..., offset : offset + 2] = (halves * times).astype(np.float16).view(np.uint8)
    return blocks.reshape(*array.shape[:-1], -1)
