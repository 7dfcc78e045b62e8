"""Writes the benchmark models: shapes of published models, random bfloat16 weights, a byte-level BPE tokenizer.

    python bench/peer_systems/make_models.py DIRECTORY [NAME ...]

Speed does not depend on the values of the weights, so nothing is downloaded. Weights come from a fixed seed. The
tokenizer is trained on the source of the running interpreter's standard library, and filler tokens extend it to the
published vocabulary size, so that every id that a random model generates can be decoded. Each DIRECTORY/NAME is a model
directory in Hugging Face layout.
"""

import argparse
import json
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from antiphon.services.engine.models.registry import find_family  # noqa: E402  (after the path)

SEED = 1729
LEARNT_TOKENS = 24_000
CORPUS_CHARS = 12_000_000
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SHAPES: dict[str, dict[str, Any]] = {
    "qwen2-0.5b-shape": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "max_position_embeddings": 32768,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
    },
    "llama-160m-shape": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
        "vocab_size": 32000,
        "max_position_embeddings": 2048,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    },
    "llama-1.1b-shape": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "vocab_size": 32000,
        "max_position_embeddings": 2048,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    },
    "lfm2-350m-shape": {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "hidden_size": 1024,
        "intermediate_size": 4608,
        "block_auto_adjust_ff_dim": False,
        "num_hidden_layers": 16,
        "layer_types": ["full_attention" if layer in (2, 5, 8, 10, 12, 14) else "conv" for layer in range(16)],
        "conv_L_cache": 3,
        "conv_bias": False,
        "norm_eps": 1e-5,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "vocab_size": 65536,
        "max_position_embeddings": 128000,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
    },
    "qwen3.5-0.8b-shape": {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 24,
        "layer_types": ["linear_attention" if (layer + 1) % 4 else "full_attention" for layer in range(24)],
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "vocab_size": 248320,
        "max_position_embeddings": 262144,
        "rope_theta": 10000000.0,
        "tie_word_embeddings": True,
    },
}
USUAL = ("qwen2-0.5b-shape", "llama-160m-shape")
"""The shapes that are made unless others are named."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes the models of the benchmarks.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(SHAPES)} (default: {', '.join(USUAL)})")
    options = parser.parse_args()
    unknown = set(options.names) - SHAPES.keys()
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    learnt = learn()
    for name in options.names or USUAL:
        started = time.perf_counter()
        count = make(options.directory / name, SHAPES[name], learnt)
        print(f"{name}: {count / 1e6:.0f} M parameters, {time.perf_counter() - started:.1f} s")


def make(directory: Path, shape: dict[str, Any], learnt: Tokenizer) -> int:
    """Writes one model directory and returns the model's number of parameters."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = widen(learnt, shape["vocab_size"])
    ids = {text: tokenizer.token_to_id(text) for text in SPECIAL_TOKENS}
    ends = {"bos_token_id": ids["<|endoftext|>"], "eos_token_id": ids["<|im_end|>"]}
    config = {**shape, **ends, "hidden_act": "silu", "rms_norm_eps": 1e-6, "torch_dtype": "bfloat16"}
    write_json(directory / "config.json", config)
    write_json(directory / "generation_config.json", {**ends, "do_sample": False})
    tokenizer.save(str(directory / "tokenizer.json"))
    facts = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": shape["max_position_embeddings"],
        "chat_template": CHAT_TEMPLATE,
    }
    write_json(directory / "tokenizer_config.json", facts)
    return write_weights(directory, config)


def write_weights(directory: Path, config: dict[str, Any], *, drafts: bool = False) -> int:
    """Writes random weights and returns their number: norm weights near one, all other values near zero.

    `drafts`: with those of the draft layer.
    """
    family = find_family(config)
    description = family.describe(config)
    generator = torch.Generator().manual_seed(SEED)
    tensors: dict[str, torch.Tensor] = {}
    for parameter in family.layout(description.with_draft_layer() if drafts else description):
        for source in parameter.sources:
            noise = torch.randn(source.shape, generator=generator) * 0.02
            tensors[source.name] = (noise + source.name.endswith("norm.weight")).to(torch.bfloat16)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return sum(tensor.numel() for tensor in tensors.values())


def learn() -> Tokenizer:
    """Trains a byte-level BPE tokenizer on the source of the standard library."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=LEARNT_TOKENS, show_progress=False, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(corpus(), trainer)
    return tokenizer


def corpus() -> Iterator[str]:
    left = CORPUS_CHARS
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        if "site-packages" in path.parts or left <= 0:
            continue
        text = path.read_text(encoding="utf-8", errors="ignore")[:left]
        left -= len(text)
        yield text


def widen(learnt: Tokenizer, vocab_size: int) -> Tokenizer:
    """Returns the tokenizer with special tokens added, and filler tokens up to `vocab_size`."""
    tokenizer = Tokenizer.from_str(learnt.to_str())
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL_TOKENS])
    fillers = range(tokenizer.get_vocab_size(), vocab_size)
    tokenizer.add_tokens([AddedToken(f"<|filler_{i}|>", special=False, normalized=False) for i in fillers])
    return tokenizer


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


if __name__ == "__main__":
    main()
