"""Makes config.json and generation_config.json from the metadata of a GGUF file.

The names of fields are those of llama.cpp, described in github.com/ggml-org/ggml, docs/gguf.md, and in its converter.
Called by `directory`.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from antiphon.shared.models.gguf_model.reader import PLAIN_TYPES, GgufModel

Config = dict[str, Any]
EMBEDDING = "token_embd.weight"
HEAD = "output.weight"
_TOKENS = "tokenizer.ggml.tokens"
_FIRST_LAYER = "blk.0."
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_QUANTIZED_DTYPE = "float16"
"""Data type of a model with quantized matrices: it can represent the scales of all of ggml's types."""
_ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|eom_id|>", "<|endoftext|>", "<EOT>")
"""Tokens that end a turn in the families' templates. llama.cpp also stops at them by default."""
_GEMMA2_27B_LAYERS, _GEMMA3_27B_LAYERS = 46, 62
_GEMMA3_PATTERN = 6


@dataclass(frozen=True, slots=True)
class _Fields:
    """The metadata whose keys begin with the architecture's name (`llama.context_length`). `short`: the key's rest."""

    model: GgufModel

    def name(self, short: str) -> str:
        return f"{self.model.architecture}.{short}"

    def has(self, short: str) -> bool:
        return self.model.has(self.name(short))

    def integer(self, short: str, default: int | None = None) -> int:
        return self.model.uniform_integer(self.name(short), default)

    def number(self, short: str, default: float | None = None) -> float:
        return self.model.number(self.name(short), default)

    def string(self, short: str, default: str) -> str:
        return self.model.string(self.name(short), default)


def model_config(model: GgufModel) -> Config:
    """Returns the content of config.json. Raises GgufError for architectures and variants that are not supported."""
    make = _ARCHITECTURES.get(model.architecture)
    if make is None:
        known = ", ".join(sorted(_ARCHITECTURES))
        raise model.fail(f"the architecture {model.architecture} is not supported in GGUF files; supported: {known}")
    config = _common(_Fields(model))
    config |= make(_Fields(model), config)
    if any(tensor.type not in PLAIN_TYPES for tensor in model.tensors.values()):
        config["quantization_config"] = {"quant_method": "gguf", "types": _types(model)}
    return config


def generation_config(model: GgufModel) -> Config:
    """Returns the content of generation_config.json: the tokens that begin and end texts."""
    ends = [model.optional_integer(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    if model.has(_TOKENS):
        ids = {text: index for index, text in enumerate(model.strings(_TOKENS)) if text in _ENDS}
        ends += [ids[text] for text in _ENDS if text in ids]
    known = list(dict.fromkeys(end for end in ends if end is not None))
    bos = model.optional_integer("tokenizer.ggml.bos_token_id")
    return ({"eos_token_id": known} if known else {}) | ({} if bos is None else {"bos_token_id": bos})


def _types(model: GgufModel) -> list[str]:
    return sorted({tensor.type for tensor in model.tensors.values()})


def _common(fields: _Fields) -> Config:
    """Returns the fields of Llama's config.json, which all supported families have."""
    model = fields.model
    embedding = model.tensors.get(EMBEDDING)
    if embedding is None:
        raise model.fail(f"the tensor {EMBEDDING} is missing: the file is not a whole model")
    hidden, heads = fields.integer("embedding_length"), fields.integer("attention.head_count")
    if heads < 1 or hidden < 1:
        raise model.fail(f"it has {heads} heads and {hidden} numbers a token")
    head_dim = fields.integer("attention.key_length", hidden // heads)
    if fields.integer("attention.value_length", head_dim) != head_dim:
        raise model.fail("keys and values of different sizes are not supported")
    context = fields.integer("context_length")
    config: Config = {
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "num_hidden_layers": fields.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": context,
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": HEAD not in model.tensors,
        "attention_bias": f"{_FIRST_LAYER}attn_q.bias" in model.tensors,
        "torch_dtype": _dtype(model),
        **_positions(fields, head_dim, context),
    }
    if fields.has("feed_forward_length"):
        config["intermediate_size"] = fields.integer("feed_forward_length")
    eos, bos = (model.optional_integer(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "bos"))
    return config | ({} if eos is None else {"eos_token_id": eos}) | ({} if bos is None else {"bos_token_id": bos})


def _dtype(model: GgufModel) -> str:
    """Returns the data type of the matrices if all are plain and of the same type; otherwise a 16-bit type."""
    types = {tensor.type for tensor in model.tensors.values() if len(tensor.shape) > 1}
    if model.architecture.startswith("gemma") and types - {"F32"}:
        return "bfloat16"  # its residual stream exceeds the range of float16
    return _DTYPES.get(types.pop(), _QUANTIZED_DTYPE) if len(types) == 1 else _QUANTIZED_DTYPE


def _positions(fields: _Fields, head_dim: int, context: int) -> Config:
    """Returns the rotary base, the part of a head that is rotated, and the scaling of positions."""
    config: Config = {"rope_theta": fields.number("rope.freq_base", 10_000.0)}
    rotated = fields.integer("rope.dimension_count", head_dim)
    if rotated != head_dim:
        config["partial_rotary_factor"] = rotated / head_dim
    scaling = _scaling(fields, context, rotated // 2)
    return config | ({"rope_scaling": scaling} if scaling else {})


def _scaling(fields: _Fields, context: int, pairs: int) -> Config:
    """Returns the scaling of positions; {} without one.

    The file has the scaling of Llama 3 and longrope as tensors, with a divisor for each rotated pair of numbers.
    """
    divisors = _divisors(fields.model, ("rope_freqs.weight", "rope_factors_short.weight"), pairs)
    original = fields.integer("rope.scaling.original_context_length", context)
    if divisors:
        factor = {"attention_factor": 1.0} if fields.model.architecture != "phi3" else {}
        if fields.has("rope.scaling.attn_factor"):
            factor = {"attention_factor": fields.number("rope.scaling.attn_factor")}
        longest = _divisors(fields.model, ("rope_factors_long.weight",), pairs)
        # longrope has other divisors for positions beyond the original context. Llama 3 has the same ones for all.
        limit = original if longest else context
        common = {"rope_type": "longrope", "original_max_position_embeddings": limit}
        return {**common, "short_factor": divisors, "long_factor": longest or divisors, **factor}
    kind = fields.string("rope.scaling.type", "none")
    if kind == "none":
        return {}
    factor = fields.number("rope.scaling.factor", 1.0)
    if kind == "linear":
        return {} if factor == 1.0 else {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    raise fields.model.fail(f"positions scaled by {kind} are not supported without a tensor of their divisors")


def _divisors(model: GgufModel, names: Iterable[str], pairs: int) -> list[float]:
    tensor = next((model.tensors[name] for name in names if name in model.tensors), None)
    if tensor is None:
        return []
    if tensor.type != "F32" or tensor.shape != (pairs,):
        raise model.fail(f"{tensor.name} is {tensor.type} {list(tensor.shape)}, not {pairs} numbers of type F32")
    return [float(value) for value in tensor.data.tolist()]


def _llama(fields: _Fields, config: Config) -> Config:
    """Llama; Mistral and Mixtral have the same name in GGUF."""
    window = _window(fields)
    if fields.integer("expert_count", 0):
        experts = {"num_local_experts": fields.integer("expert_count")}
        return {**_named("Mixtral"), **experts, "num_experts_per_tok": fields.integer("expert_used_count"), **window}
    if window:
        return {**_named("Mistral"), **window}
    return {**_named("Llama"), "mlp_bias": f"{_FIRST_LAYER}ffn_up.bias" in fields.model.tensors}


def _qwen2_moe(fields: _Fields, config: Config) -> Config:
    shared = fields.integer("expert_shared_feed_forward_length")
    return {**_named("Qwen2Moe"), **_experts(fields, False), "shared_expert_intermediate_size": shared}


def _phi3(fields: _Fields, config: Config) -> Config:
    original = fields.integer("rope.scaling.original_context_length", config["max_position_embeddings"])
    return {**_named("Phi3"), "original_max_position_embeddings": original, **_window(fields)}


def _gemma2(fields: _Fields, config: Config) -> Config:
    caps = {
        "attn_logit_softcapping": fields.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": fields.number("final_logit_softcapping", 30.0),
    }
    window = {"sliding_window": fields.integer("attention.sliding_window", 4096)}
    return {**_named("Gemma2"), **_GELU, **caps, **window, **_query_scalar(config, _GEMMA2_27B_LAYERS)}


def _gemma3(fields: _Fields, config: Config) -> Config:
    window = {
        "sliding_window": fields.integer("attention.sliding_window"),
        "sliding_window_pattern": _GEMMA3_PATTERN,
        "rope_local_base_freq": fields.number("rope.freq_base_swa", 10_000.0),
        "rope_theta": fields.number("rope.freq_base", 1_000_000.0),
    }
    return {
        **_named("Gemma3", "gemma3_text"), **_GELU, **window, **_query_scalar(config, _GEMMA3_27B_LAYERS),
    }  # fmt: skip


def _query_scalar(config: Config, largest: int) -> Config:
    """Returns the scale parameter of attention scores.

    In the model with 27 billion parameters it is not the head size.
    """
    if config["num_hidden_layers"] == largest:
        return {"query_pre_attn_scalar": config["hidden_size"] // config["num_attention_heads"]}
    return {"query_pre_attn_scalar": config["head_dim"]}


def _experts(fields: _Fields, normalise: bool) -> Config:
    size = fields.integer("expert_feed_forward_length")
    return {
        "intermediate_size": fields.integer("feed_forward_length", size),
        "num_experts": fields.integer("expert_count"),
        "num_experts_per_tok": fields.integer("expert_used_count"),
        "moe_intermediate_size": size,
        "norm_topk_prob": normalise,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _window(fields: _Fields) -> Config:
    window = fields.integer("attention.sliding_window", 0)
    return {"sliding_window": window} if window else {}


def _named(name: str, model_type: str = "") -> Config:
    return {"architectures": [f"{name}ForCausalLM"], "model_type": model_type or _type_name(name)}


def _type_name(name: str) -> str:
    return name.lower().replace("moe", "_moe")


_GELU = {"hidden_activation": "gelu_pytorch_tanh"}
_ARCHITECTURES: dict[str, Callable[[_Fields, Config], Config]] = {
    "llama": _llama,
    "qwen2": lambda fields, config: _named("Qwen2"),
    "qwen3": lambda fields, config: _named("Qwen3"),
    "qwen2moe": _qwen2_moe,
    "qwen3moe": lambda fields, config: {**_named("Qwen3Moe"), **_experts(fields, True)},
    "phi3": _phi3,
    "gemma": lambda fields, config: {**_named("Gemma"), **_GELU},
    "gemma2": _gemma2,
    "gemma3": _gemma3,
}
"""Architecture in GGUF → the fields that it adds to Llama's."""
