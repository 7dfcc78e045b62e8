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

Array = NDArray[Any]
Kind = gguf.GGMLQuantizationType
ARCHITECTURES = {
    "llama": "llama", "mistral": "llama", "mixtral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "phi3": "phi3",
    "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "gemma": "gemma", "gemma2": "gemma2", "gemma3_text": "gemma3",
}  # fmt: skip
PLAIN = (Kind.F32, Kind.F16, Kind.BF16)
_EXPERT = re.compile(r"(.*)\.experts\.(\d+)\.(.*)")
_STACKED = {"w1": "ffn_gate_exps", "w2": "ffn_down_exps", "w3": "ffn_up_exps"}
_STACKED |= {f"{part}_proj": f"ffn_{part}_exps" for part in ("gate", "up", "down")}
_HALF_OFFSETS = {Kind.Q2_K: (80, 82), Kind.Q3_K: (108,), Kind.Q4_K: (0, 2), Kind.Q5_K: (0, 2), Kind.Q6_K: (208,)}
_HALF_OFFSETS |= {Kind.IQ4_NL: (0,)}


def write_gguf(
    model: Path,
    path: Path,
    kind: Kind | Callable[[str], Kind] = Kind.F32,
    change: Callable[[gguf.GGUFWriter], None] | None = None,
    **fields: Any,
) -> Path:
    """Writes a model directory of `tests.models` as a file, and the plain model to a directory beside it.

    `kind` is that of the matrices, or gives that of a tensor; rows that are not whole blocks stay F32. `fields` are
    further fields of the architecture. Gives the directory of the plain model back.
    """
    config = json.loads((model / "config.json").read_text())
    architecture = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(path, architecture)
    _add_config(writer, config, architecture)
    add_tokenizer(writer, model, config["vocab_size"])
    for name, value in fields.items():
        {float: writer.add_float32, int: writer.add_uint32, str: writer.add_string}[type(value)](
            f"{architecture}.{name.replace('__', '.')}", value
        )
    if change is not None:
        change(writer)
    tensors = {name: tensor.float().numpy() for name, tensor in load_file(model / "model.safetensors").items()}
    plain = _add_tensors(writer, tensors, config, architecture, kind if callable(kind) else lambda _: kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    directory = path.with_suffix("")
    shutil.copytree(model, directory)
    contiguous = {name: torch.from_numpy(np.array(array)) for name, array in plain.items()}
    save_file(contiguous, directory / "model.safetensors", {"format": "pt"})
    return directory


def _add_config(writer: gguf.GGUFWriter, config: dict[str, Any], architecture: str) -> None:
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    rope = config.get("rope_parameters") or {}
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(rope.get("full_attention", rope).get("rope_theta", 10_000.0))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    _add_positions(writer, rope, head_dim // 2, config)
    if config.get("sliding_window") and architecture not in ("qwen2", "qwen3", "qwen2moe", "qwen3moe"):
        writer.add_sliding_window(config["sliding_window"])
    experts = config.get("num_local_experts") or config.get("num_experts")
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if "moe_intermediate_size" in config:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if architecture == "qwen2moe":
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
    names = gguf.get_tensor_name_map(enum, config["num_hidden_layers"])
    plain: dict[str, Array] = {}
    stacks: dict[str, list[tuple[int, Array]]] = {}
    for name, array in sorted(tensors.items()):
        if name == "lm_head.weight" and config.get("tie_word_embeddings"):
            plain[name] = array
            continue
        forth, back = _order(name, array, config, architecture)
        expert = _EXPERT.fullmatch(name)
        if expert is not None:
            layer = re.findall(r"\d+", name)[0]
            theirs = f"blk.{layer}.{_STACKED[expert[3].removesuffix('.weight')]}.weight"
        else:
            found = names.get_name(name, try_suffixes=(".weight", ".bias"))
            assert found is not None, name
            theirs = found
        stored, kind, meaning = encoded(forth(array), kind_of(theirs))
        plain[name] = back(meaning)
        if expert is not None:
            stacks.setdefault(theirs, []).append((int(expert[2]), stored))
        else:
            stored = stored[0] if "shared_expert_gate" in name and kind == Kind.F32 else stored
            writer.add_tensor(theirs, stored, raw_dtype=kind)
    for theirs, parts in stacks.items():
        stack = np.stack([array for _, array in sorted(parts, key=lambda part: part[0])])
        kind = kind_of(theirs)
        writer.add_tensor(theirs, stack, raw_dtype=kind if stack.dtype == np.uint8 or kind == Kind.F16 else Kind.F32)
    return plain


def _order(name: str, array: Array, config: dict[str, Any], architecture: str) -> tuple[Any, Any]:
    """What the converter does to a tensor, and the inverse."""
    same = lambda x: x  # noqa: E731
    if architecture.startswith("gemma") and name.endswith("norm.weight"):
        return (lambda x: x + np.float32(1)), (lambda x: x - np.float32(1))
    projection = name.split(".")[-2]
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}.get(projection)
    if architecture != "llama" or heads is None:
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
