"""Makes config.json and generation_config.json from the metadata of a GGUF file.

The names of fields are those of llama.cpp, described in github.com/ggml-org/ggml, docs/gguf.md, and in its converter.
Called by `directory`.
"""

from collections.abc import Callable, Iterable

from antiphon.shared.models.gguf_model import gemma, granite, recurrent, state_spaces
from antiphon.shared.models.gguf_model.fields import (
    GELU,
    RECURRENT,
    UNEVEN,
    WITHOUT_ATTENTION,
    Config,
    Fields,
    named,
    window,
)
from antiphon.shared.models.gguf_model.reader import PLAIN_TYPES, GgufModel

EMBEDDING = "token_embd.weight"
HEAD = "output.weight"
_TOKENS = "tokenizer.ggml.tokens"
_FIRST_LAYER = "blk.0."
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_LLAMA4_CHUNK, _LLAMA4_INTERVAL, _MAVERICKS_EXPERTS = 8192, 4, 128
"""Of Llama 4: the tokens of a chunk; of so many layers one is not rotated; experts of the model without norms."""
_QUANTIZED_DTYPE = "float16"
"""Data type of a model with quantized matrices: it can represent the scales of all of ggml's types."""
_ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|eom_id|>", "<|endoftext|>", "<EOT>", "<turn|>")
"""Tokens that end a turn in the families' templates. llama.cpp also stops at them by default."""


def model_config(model: GgufModel) -> Config:
    """Returns the content of config.json. Raises GgufError for architectures and variants that are not supported."""
    make = _ARCHITECTURES.get(model.architecture)
    if make is None:
        known = ", ".join(supported_architectures())
        raise model.fail(f"the architecture {model.architecture} is not supported in GGUF files; supported: {known}")
    config = _common(Fields(model))
    config |= make(Fields(model), config)
    if any(tensor.type not in PLAIN_TYPES for tensor in model.tensors.values()):
        config["quantization_config"] = {"quant_method": "gguf", "types": _types(model)}
    return config


def supported_architectures() -> list[str]:
    """Returns the architecture names in GGUF files that are supported, sorted."""
    return sorted(_ARCHITECTURES)


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


def _common(fields: Fields) -> Config:
    """Returns the fields of Llama's config.json, which all supported families have."""
    model = fields.model
    embedding = model.tensors.get(EMBEDDING)
    if embedding is None:
        raise model.fail(f"the tensor {EMBEDDING} is missing: the file is not a whole model")
    hidden = fields.integer("embedding_length")
    if hidden < 1:
        raise model.fail(f"a token has {hidden} numbers")
    config: Config = {
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "num_hidden_layers": fields.num_layers,
        "max_position_embeddings": fields.integer("context_length"),
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon", _layer_norm_epsilon(fields)),
        "tie_word_embeddings": HEAD not in model.tensors,
        "torch_dtype": _dtype(model),
    }
    if model.architecture not in WITHOUT_ATTENTION:
        config |= _heads(fields, hidden)
    eos, bos = (model.optional_integer(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "bos"))
    return config | ({} if eos is None else {"eos_token_id": eos}) | ({} if bos is None else {"bos_token_id": bos})


def _heads(fields: Fields, hidden: int) -> Config:
    """Returns the fields about attention and MLPs."""
    model, heads = fields.model, fields.integer("attention.head_count")
    if heads < 1:
        raise model.fail(f"it has {heads} heads")
    head_dim = fields.integer("attention.key_length", hidden // heads)
    if model.architecture not in UNEVEN and fields.integer("attention.value_length", head_dim) != head_dim:
        raise model.fail("keys and values of different sizes are not supported")
    config: Config = {
        "num_attention_heads": heads,
        "head_dim": head_dim,
        "attention_bias": any(name.endswith(".attn_q.bias") for name in model.tensors),
    }
    if model.architecture not in UNEVEN:
        some = model.architecture in RECURRENT
        config["num_key_value_heads"] = fields.integer("attention.head_count_kv", heads, some=some)
        config |= _positions(fields, head_dim, fields.integer("context_length"))
        if fields.has("feed_forward_length"):
            config["intermediate_size"] = fields.integer("feed_forward_length", some=some)
    return config


def _layer_norm_epsilon(fields: Fields) -> float | None:
    """Returns the epsilon that newer files of Nemotron H have in place of the usual one."""
    return fields.number("attention.layer_norm_epsilon") if fields.has("attention.layer_norm_epsilon") else None


def _dtype(model: GgufModel) -> str:
    """Returns the data type of the matrices if all are plain and of the same type; otherwise a 16-bit type.

    Routers and kernels of convolutions are F32 in every file.
    """
    types = {tensor.type for tensor in model.tensors.values() if len(tensor.shape) > 1}
    types = types - {"F32"} or types
    if model.architecture.startswith("gemma") and types - {"F32"}:
        return "bfloat16"  # its residual stream exceeds the range of float16
    return _DTYPES.get(types.pop(), _QUANTIZED_DTYPE) if len(types) == 1 else _QUANTIZED_DTYPE


def _positions(fields: Fields, head_dim: int, context: int) -> Config:
    """Returns the rotary base, the part of a head that is rotated, and the scaling of positions."""
    config: Config = {"rope_theta": fields.number("rope.freq_base", 10_000.0)}
    rotated = fields.integer("rope.dimension_count", head_dim)
    if rotated != head_dim:
        config["partial_rotary_factor"] = rotated / head_dim
    scaling = _scaling(fields, context, rotated // 2)
    return config | ({"rope_scaling": scaling} if scaling else {})


def _scaling(fields: Fields, context: int, pairs: int) -> Config:
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
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original, **_yarn(fields)}
    raise fields.model.fail(f"positions scaled by {kind} are not supported without a tensor of their divisors")


def _yarn(fields: Fields) -> Config:
    """Returns those of the file: bounds of yarn's ramp, the weight of its factor on scores, the growth of queries."""
    numbers = {
        "beta_fast": "rope.scaling.yarn_beta_fast",
        "beta_slow": "rope.scaling.yarn_beta_slow",
        "mscale_all_dim": "rope.scaling.yarn_log_multiplier",
        "llama_4_scaling_beta": "attention.temperature_scale",
    }
    found = {name: fields.number(short) for name, short in numbers.items() if fields.has(short)}
    return {"mscale": 1.0, **found} if found.get("mscale_all_dim") else found


def _divisors(model: GgufModel, names: Iterable[str], pairs: int) -> list[float]:
    tensor = next((model.tensors[name] for name in names if name in model.tensors), None)
    if tensor is None:
        return []
    if tensor.type != "F32" or tensor.shape != (pairs,):
        raise model.fail(f"{tensor.name} is {tensor.type} {list(tensor.shape)}, not {pairs} numbers of type F32")
    return [float(value) for value in tensor.data.tolist()]


def _llama(fields: Fields, config: Config) -> Config:
    """Llama; Mistral and Mixtral have the same name in GGUF."""
    sliding = window(fields)
    if fields.integer("expert_count", 0):
        experts = {"num_local_experts": fields.integer("expert_count")}
        return {**named("Mixtral"), **experts, "num_experts_per_tok": fields.integer("expert_used_count"), **sliding}
    if sliding:
        return {**named("Mistral"), **sliding}
    return {**named("Llama"), "mlp_bias": f"{_FIRST_LAYER}ffn_up.bias" in fields.model.tensors}


def _llama4(fields: Fields, config: Config) -> Config:
    """Llama 4: what the file does not have is the same in all published models, and fixed in llama.cpp too."""
    experts, interval = fields.integer("expert_count"), _LLAMA4_INTERVAL
    if fields.integer("attention.sliding_window", _LLAMA4_CHUNK) != _LLAMA4_CHUNK:
        raise fields.model.fail(f"chunks of another length than {_LLAMA4_CHUNK} are not supported")
    return {
        **named("Llama4", "llama4_text"),
        "intermediate_size": fields.integer("expert_feed_forward_length"),
        "intermediate_size_mlp": config["intermediate_size"],
        "num_local_experts": experts,
        "num_experts_per_tok": fields.integer("expert_used_count"),
        "interleave_moe_layer_step": fields.integer("interleave_moe_layer_step"),
        "no_rope_layers": [int((layer + 1) % interval != 0) for layer in range(fields.num_layers)],
        "use_qk_norm": experts != _MAVERICKS_EXPERTS,
        "attention_chunk_size": _LLAMA4_CHUNK,
        "split_projections": True,
    }


def _olmoe(fields: Fields, config: Config) -> Config:
    experts = {
        "num_experts": fields.integer("expert_count"),
        "num_experts_per_tok": fields.integer("expert_used_count"),
    }
    return {**named("Olmoe", "olmoe"), **experts}


def _qwen2_moe(fields: Fields, config: Config) -> Config:
    shared = fields.integer("expert_shared_feed_forward_length")
    return {**named("Qwen2Moe"), **_experts(fields, False), "shared_expert_intermediate_size": shared}


def _phi3(fields: Fields, config: Config) -> Config:
    original = fields.integer("rope.scaling.original_context_length", config["max_position_embeddings"])
    return {**named("Phi3"), "original_max_position_embeddings": original, **window(fields)}


def _experts(fields: Fields, normalise: bool) -> Config:
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


_ARCHITECTURES: dict[str, Callable[[Fields, Config], Config]] = {
    "llama": _llama,
    "qwen2": lambda fields, config: named("Qwen2"),
    "qwen3": lambda fields, config: named("Qwen3"),
    "qwen2moe": _qwen2_moe,
    "qwen3moe": lambda fields, config: {**named("Qwen3Moe"), **_experts(fields, True)},
    "phi3": _phi3,
    "arcee": lambda fields, config: {**named("Arcee"), "hidden_act": "relu2"},
    "granite": granite.granite,
    "granitehybrid": granite.granite_hybrid,
    "mistral3": lambda fields, config: {**named("Ministral3"), **window(fields)},
    "olmoe": _olmoe,
    "gemma": lambda fields, config: {**named("Gemma"), **GELU},
    "gemma2": gemma.gemma2,
    "gemma3": gemma.gemma3,
    "gemma3n": gemma.gemma3n,
    "gemma4": gemma.gemma4,
    "lfm2": recurrent.lfm2,
    "lfm2moe": recurrent.lfm2_moe,
    "qwen35": recurrent.qwen3_5,
    "qwen35moe": recurrent.qwen3_5_moe,
    "qwen3next": recurrent.qwen3_next,
    "nemotron_h": state_spaces.nemotron_h,
    "nemotron_h_moe": state_spaces.nemotron_h,
    "mamba": state_spaces.mamba,
    "mamba2": state_spaces.mamba2,
    "falcon-h1": state_spaces.falcon_h1,
    "jamba": state_spaces.jamba,
    "llama4": _llama4,
    "kimi-linear": recurrent.kimi_linear,
}
"""Architecture in GGUF → the fields that it adds to Llama's."""
