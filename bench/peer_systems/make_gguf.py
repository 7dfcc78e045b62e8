"""Writes a model of `make_models.py` in llama.cpp's file format, so that both systems run the same weights.

    python -m bench.peer_systems.make_gguf MODEL_DIRECTORY [OUT.gguf]

Supports only the shapes of `make_models.py` (llama, qwen2, lfm2, qwen3_5_text with as many key heads as value heads;
bfloat16 in one safetensors file; byte-level BPE); it is not a general converter. Format: GGUF version 3,
github.com/ggml-org/ggml, docs/gguf.md.

    file      "GGUF", version, counts, metadata, one line for each tensor, padding, the tensors' data
    string    u64 length, bytes                   array     u32 type of an element, u64 length, elements
    tensor    name, u32 number of dimensions, u64 each (innermost first), u32 type, u64 offset in the data
"""

import argparse
import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

VERSION = 3
ALIGNMENT = 32
U32, I32, F32, BOOL, STRING, ARRAY = 4, 5, 6, 7, 8, 9
TENSOR_F32, TENSOR_BF16 = 0, 30
FILE_TYPE_BF16 = 32
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}
LFM2, QWEN3_5 = "lfm2", "qwen3_5_text"
FAMILY_NAMES = {
    LFM2: {
        "model.embedding_norm": "token_embd_norm",
        "operator_norm": "attn_norm",
        "self_attn.q_layernorm": "attn_q_norm",
        "self_attn.k_layernorm": "attn_k_norm",
        "self_attn.out_proj": "attn_output",
        "conv.conv": "shortconv.conv",
        "conv.in_proj": "shortconv.in_proj",
        "conv.out_proj": "shortconv.out_proj",
        "ffn_norm": "ffn_norm",
        "feed_forward.w1": "ffn_gate",
        "feed_forward.w3": "ffn_up",
        "feed_forward.w2": "ffn_down",
    },
    QWEN3_5: {
        "post_attention_layernorm": "post_attention_norm",
        "linear_attn.in_proj_qkv": "attn_qkv",
        "linear_attn.in_proj_z": "attn_gate",
        "linear_attn.in_proj_b": "ssm_beta",
        "linear_attn.in_proj_a": "ssm_alpha",
        "linear_attn.conv1d": "ssm_conv1d",
        "linear_attn.norm": "ssm_norm",
        "linear_attn.out_proj": "ssm_out",
        "linear_attn.A_log": "ssm_a",
        "linear_attn.dt_bias": "ssm_dt.bias",
    },
}
"""What a family names otherwise than in `NAMES`, or has besides."""
ARCHITECTURES = {QWEN3_5: "qwen35"}
"""The names of architectures that are not their `model_type`."""
MROPE_SECTIONS = [11, 11, 10, 0]
"""How llama.cpp divides rotated dimensions among time, height and width; for text all three positions are the same."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor as it is written to the file: bfloat16 values as 16-bit integers, or float32."""

    name: str
    values: NDArray[np.uint16] | NDArray[np.float32]

    @property
    def type(self) -> int:
        """The number of the tensor's data type in GGUF."""
        return TENSOR_BF16 if self.values.dtype == np.uint16 else TENSOR_F32


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes a benchmark model in llama.cpp's file format.")
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path, nargs="?", help="default: MODEL-bf16.gguf beside the directory")
    options = parser.parse_args()
    out = options.out or options.model.with_name(options.model.name + "-bf16.gguf")
    write(options.model, out)
    print(out)


def write(model: Path, out: Path) -> None:
    """Converts the model directory `model` to the file `out`."""
    config = read_json(model / "config.json")
    tensors = read_tensors(model / "model.safetensors", config)
    fields = {**model_fields(model.name, config), **tokenizer_fields(model, config)}
    with out.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", VERSION, len(tensors), len(fields)))
        for key, value in fields.items():
            file.write(string(key) + encoded(value))
        offset = 0
        for tensor in tensors:
            shape = tensor.values.shape[::-1]
            file.write(string(tensor.name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, tensor.type, offset))
            offset += tensor.values.nbytes + padding(tensor.values.nbytes)
        pad(file)
        for tensor in tensors:
            file.write(tensor.values.tobytes())
            pad(file)


def model_fields(name: str, config: dict[str, Any]) -> dict[str, Any]:
    """Returns the metadata fields of a model's shape."""
    arch = ARCHITECTURES.get(config["model_type"], config["model_type"])
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rotated = int(head_dim * config.get("partial_rotary_factor", 1))
    common = {
        "general.architecture": arch,
        "general.name": name,
        "general.file_type": FILE_TYPE_BF16,
        f"{arch}.context_length": config["max_position_embeddings"],
        f"{arch}.embedding_length": config["hidden_size"],
        f"{arch}.block_count": config["num_hidden_layers"],
        f"{arch}.feed_forward_length": config["intermediate_size"],
        f"{arch}.attention.head_count": config["num_attention_heads"],
        f"{arch}.attention.head_count_kv": config["num_key_value_heads"],
        f"{arch}.attention.layer_norm_rms_epsilon": float(config.get("norm_eps", config["rms_norm_eps"])),
        f"{arch}.rope.dimension_count": rotated,
        f"{arch}.rope.freq_base": float(config["rope_theta"]),
        f"{arch}.vocab_size": config["vocab_size"],
    }
    return common | {f"{arch}.{key}": value for key, value in recurrent_fields(config).items()}


def recurrent_fields(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields, without the architecture's name, of models whose layers do not all have attention."""
    if config["model_type"] == LFM2:
        kv_heads = config["num_key_value_heads"]
        heads = [kv_heads if kind == "full_attention" else 0 for kind in config["layer_types"]]
        return {"attention.head_count_kv": heads, "shortconv.l_cache": config["conv_L_cache"]}
    if config["model_type"] == QWEN3_5:
        return {
            "attention.key_length": config["head_dim"],
            "attention.value_length": config["head_dim"],
            "rope.dimension_sections": MROPE_SECTIONS,
            "ssm.conv_kernel": config["linear_conv_kernel_dim"],
            "ssm.state_size": config["linear_key_head_dim"],
            "ssm.group_count": config["linear_num_key_heads"],
            "ssm.time_step_rank": config["linear_num_value_heads"],
            "ssm.inner_size": config["linear_value_head_dim"] * config["linear_num_value_heads"],
            "full_attention_interval": config["layer_types"].index("full_attention") + 1,
        }
    return {}


def tokenizer_fields(model: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Returns the metadata fields of the tokenizer: vocabulary, merges, special tokens and chat template."""
    tokenizer = read_json(model / "tokenizer.json")
    tokens, kinds = [""] * config["vocab_size"], [NORMAL] * config["vocab_size"]
    for text, index in tokenizer["model"]["vocab"].items():
        tokens[index] = text
    for added in tokenizer["added_tokens"]:
        tokens[added["id"]] = added["content"]
        kinds[added["id"]] = CONTROL if added["special"] else USER_DEFINED
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": [m if isinstance(m, str) else " ".join(m) for m in tokenizer["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": config["bos_token_id"],
        "tokenizer.ggml.eos_token_id": config["eos_token_id"],
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": read_json(model / "tokenizer_config.json")["chat_template"],
    }


def read_tensors(path: Path, config: dict[str, Any]) -> list[Tensor]:
    """Returns all tensors of a safetensors file: matrices in bfloat16, vectors in float32, as llama.cpp requires."""
    data = np.memmap(path, dtype=np.uint8, mode="r")
    start = 8 + int.from_bytes(data[:8].tobytes(), "little")
    header = json.loads(data[8:start].tobytes())
    header.pop("__metadata__", None)
    tensors: list[Tensor] = []
    for name, entry in sorted(header.items()):
        if entry["dtype"] != "BF16":
            raise SystemExit(f"{path}: {name} is {entry['dtype']}; only bfloat16 is known here")
        first, last = (start + offset for offset in entry["data_offsets"])
        values = data[first:last].view(np.uint16).reshape(entry["shape"])
        tensors.append(Tensor(renamed(name, config["model_type"]), arranged(name, values, config)))
    return tensors


def renamed(name: str, family: str) -> str:
    """Returns the GGUF name of a tensor: model.layers.3.mlp.up_proj.weight becomes blk.3.ffn_up.weight."""
    names = NAMES | FAMILY_NAMES.get(family, {})
    block, stem = "", name
    if name.startswith("model.layers."):
        _, _, layer, stem = name.split(".", 3)
        block = f"blk.{layer}."
    if stem in names:
        return block + names[stem]
    stem, _, kind = stem.rpartition(".")
    return f"{block}{names[stem]}.{kind}"


def arranged(name: str, values: NDArray[np.uint16], config: dict[str, Any]) -> NDArray[np.uint16] | NDArray[np.float32]:
    """Returns a tensor's values in GGUF's type and order.

    What is not a matrix becomes float32. For llama, the rows of the query and key projections are reordered for
    interleaved rotation.
    """
    if values.ndim != 2:
        return exact(name, values, config["model_type"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    projection = name.split(".")[-2]
    if config["model_type"] != "llama" or projection not in heads:
        return values
    rows, columns = values.shape
    halves = values.reshape(heads[projection], 2, rows // heads[projection] // 2, columns)
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows, columns)


def exact(name: str, values: NDArray[np.uint16], family: str) -> NDArray[np.float32]:
    """Returns a vector or a convolution, [channels, kernel size], as llama.cpp computes with it."""
    floats = (values.astype(np.uint32) << 16).view(np.float32)
    if floats.ndim == 3:
        return floats[:, 0]
    if family == QWEN3_5 and name.endswith("A_log"):
        return -np.exp(floats)
    if family == QWEN3_5 and name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        return floats + np.float32(1)
    return floats


def encoded(value: Any) -> bytes:
    """Returns the encoding of a metadata value: its type, then the value."""
    if isinstance(value, list):
        kind = U32 if not value else I32 if isinstance(value[0], int) else STRING
        return struct.pack("<IIQ", ARRAY, kind, len(value)) + b"".join(element(item) for item in value)
    if isinstance(value, bool):
        return struct.pack("<I?", BOOL, value)
    if isinstance(value, int):
        return struct.pack("<II", U32, value)
    if isinstance(value, float):
        return struct.pack("<If", F32, value)
    return struct.pack("<I", STRING) + string(value)


def element(item: int | str) -> bytes:
    """Returns the encoding of an element of an array."""
    return struct.pack("<i", item) if isinstance(item, int) else string(item)


def string(text: str) -> bytes:
    """Returns the encoding of a string: its length in bytes, then the bytes."""
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def padding(size: int) -> int:
    """Returns the number of bytes from `size` to the next multiple of the alignment."""
    return -size % ALIGNMENT


def pad(file: BinaryIO) -> None:
    """Writes zero bytes up to the next multiple of the alignment."""
    file.write(bytes(padding(file.tell())))


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object from a file."""
    return json.loads(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
