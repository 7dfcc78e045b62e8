"""Model directories without weights: shapes of published models, and small ones for each kind of layer.

The engine draws the weights on the device (`--load-format dummy`), so that a large model takes only seconds and no
disk. The tokenizer is a byte-level BPE without merges, extended by filler tokens to the vocabulary size, so that every
id can be decoded.
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

LARGE = "llama-3.1-8b"
_LLAMA_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_SMALL: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
_EXPERTS = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 256, "norm_topk_prob": True}
_LATENTS = {
    "num_key_value_heads": 8,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": None,
    "first_k_dense_replace": 2,
}
SHAPES: dict[str, dict[str, Any]] = {
    LARGE: {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "rope_scaling": _LLAMA_ROPE,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    },
    "experts": {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", **_SMALL, **_EXPERTS},
    "latents": {"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", **_SMALL, **_LATENTS},
    "window": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", **_SMALL, "sliding_window": 33},
}
KINDS = ("experts", "latents", "window")
"""The small models, by what their layers have."""
_TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "moe_intermediate_size": 32,
    "head_dim": 16,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "sliding_window": 5,
}


def make(name: str, directory: Path, *, tiny: bool = False, **changed: Any) -> Path:
    """Writes DIRECTORY/NAME and returns this path. `tiny`: with layers as small as the kernels take.

    `changed`: fields of the config that differ from those of `SHAPES`.
    """
    target = directory / name
    target.mkdir(parents=True, exist_ok=True)
    shape = dict(SHAPES[name])
    if tiny:
        shape |= {field: value for field, value in _TINY.items() if field in shape}
        shape |= {"num_key_value_heads": 4} if "kv_lora_rank" in shape else {}
    config = {**shape, "hidden_act": "silu", "torch_dtype": "bfloat16", "bos_token_id": 0, "eos_token_id": 0, **changed}
    _write(target / "config.json", config)
    _write(target / "generation_config.json", {"bos_token_id": 0, "eos_token_id": 0})
    _write_tokenizer(target, config["vocab_size"], config["max_position_embeddings"])
    return target


def _write_tokenizer(directory: Path, vocab_size: int, max_length: int) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<|endoftext|>": 0, **{text: i + 1 for i, text in enumerate(alphabet)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|endoftext|>", special=True)])
    fillers = range(tokenizer.get_vocab_size(), vocab_size)
    tokenizer.add_tokens([AddedToken(f"<|filler_{i}|>", normalized=False) for i in fillers])
    tokenizer.save(str(directory / "tokenizer.json"))
    facts = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", "model_max_length": max_length}
    _write(directory / "tokenizer_config.json", facts)


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")
