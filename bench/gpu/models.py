"""Writes model directories with the shapes of published models and random bfloat16 weights.

The weights are drawn on the GPU, so that a large model takes only seconds; their values do not matter for speed. The
tokenizer is a byte-level BPE without merges, extended by filler tokens to the vocabulary size, so that every id can be
decoded.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from antiphon.services.engine.models.registry import find_family

_LLAMA_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
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
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    },
}
_BYTES_A_SHARD = 4 * 10**9


def make(name: str, directory: Path, device: str = "cuda") -> Path:
    """Writes the model to DIRECTORY/NAME unless it exists already, and returns this path."""
    target = directory / name
    if (target / "tokenizer.json").exists():
        return target
    target.mkdir(parents=True, exist_ok=True)
    config = {**SHAPES[name], "hidden_act": "silu", "torch_dtype": "bfloat16", "bos_token_id": 0, "eos_token_id": 0}
    _write(target / "config.json", config)
    _write(target / "generation_config.json", {"bos_token_id": 0, "eos_token_id": 0})
    _write_weights(target, config, device)
    _write_tokenizer(target, config["vocab_size"], config["max_position_embeddings"])
    return target


def _write_weights(directory: Path, config: dict[str, Any], device: str) -> None:
    family = find_family(config)
    generator = torch.Generator(device).manual_seed(1729)
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for parameter in family.layout(family.describe(config)):
        for source in parameter.sources:
            noise = torch.randn(source.shape, generator=generator, device=device) * 0.02
            tensor = (noise + source.name.endswith("norm.weight")).to(torch.bfloat16).cpu()
            if size > _BYTES_A_SHARD:
                shards.append({})
                size = 0
            shards[-1][source.name] = tensor
            size += tensor.nbytes
    index: dict[str, str] = {}
    for number, shard in enumerate(shards):
        name = f"model-{number:05d}.safetensors"
        save_file(shard, directory / name, metadata={"format": "pt"})
        index |= dict.fromkeys(shard, name)
    _write(directory / "model.safetensors.index.json", {"metadata": {}, "weight_map": index})


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
