"""Small random models for tests: a model directory as the field writes it, weights from a seed, a byte-level tokenizer.

Nothing here is trained. The weights are drawn wide enough that greedy decoding wanders over the vocabulary instead of
repeating one token, and biases and norms are random too: a bias that a loader forgets must change the output.
"""

import functools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.foreign_models import FOREIGN_FAMILIES
from tests.own_cache_models import OWN_CACHE_FAMILIES
from tests.plain_decoders import (
    PLAIN_FAMILIES,
    is_plain,
    plain_config,
    plain_greedy,
    plain_log_probabilities,
    write_plain_model,
)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
BOS_TOKEN_ID, IM_START_TOKEN_ID, EOS_TOKEN_ID = 0, 1, 2
VOCAB_SIZE = 331
"""Odd, so that nothing can rely on a round width: 3 special tokens, 256 bytes, merges, fillers."""

_MERGED_WORDS = (
    " the",
    " and",
    " of",
    " to",
    " in",
    " that",
    " is",
    " was",
    "ing",
    "er",
    "on",
    "re",
    " a",
    " wh",
    "é",
    "好",
)
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "bos_token_id": BOS_TOKEN_ID,
    "eos_token_id": EOS_TOKEN_ID,
    "pad_token_id": BOS_TOKEN_ID,
}
_EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
_ROUTED: dict[str, Any] = {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}
_LATENT: dict[str, Any] = {
    **_ROUTED,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
}
_LINEAR: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "head_dim": 16,
    "partial_rotary_factor": 0.5,
}
_WINDOWED: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "sliding_window": 20,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
_MAMBA: dict[str, Any] = {
    "num_hidden_layers": 4,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 16,
}
_GRANITE = {
    "logits_scaling": 2.0,
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.4,
}
_GEMMA4: dict[str, Any] = {
    **_WINDOWED,
    "global_head_dim": 48,
    "tie_word_embeddings": True,
    "final_logit_softcapping": 20.0,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    },
}
_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 80},
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 72},
    "qwen3_moe": {**_EXPERTS, "head_dim": 32},
    "gemma": {"head_dim": 24, "tie_word_embeddings": True},
    "gemma2": {"head_dim": 24, "tie_word_embeddings": True, "query_pre_attn_scalar": 20, "sliding_window": 20},
    "gemma3_text": {"head_dim": 24, "tie_word_embeddings": True, "query_pre_attn_scalar": 20, "sliding_window": 20},
    "gemma4_text": {
        **_GEMMA4,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
    },
    "gemma4_unified_text": _GEMMA4,
    "gemma3n_text": {
        **_WINDOWED,
        "num_kv_shared_layers": 2,
        "intermediate_size": [176, 176, 208, 176],
        "activation_sparsity_pattern": [0.95, 0.8, 0.0, 0.0],
        "vocab_size_per_layer_input": 331,
        "hidden_size_per_layer_input": 24,
        "laurel_rank": 12,
        "altup_num_inputs": 4,
        # A head of its own: with the embeddings as head such a small model repeats tokens.
        "tie_word_embeddings": False,
        "final_logit_softcapping": 20.0,
    },
    "phi3": {},
    "glm": {"head_dim": 16},
    "gpt_neox": {},
    "gpt2": {"tie_word_embeddings": True},
    "opt": {"ffn_dim": 176, "word_embed_proj_dim": 64, "tie_word_embeddings": True},
    "olmo2": {},
    "cohere": {"tie_word_embeddings": True, "logit_scale": 0.5},
    "cohere2": {"logit_scale": 0.5, "sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"]},
    "olmo3": {"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"]},
    "granite": _GRANITE,
    "granitemoe": {**_GRANITE, "num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 48},
    "granitemoeshared": {
        **_GRANITE,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "intermediate_size": 48,
        "shared_intermediate_size": 72,
    },
    "granitemoehybrid": {
        **_GRANITE,
        **_MAMBA,
        "layer_types": ["mamba", "attention", "attention", "mamba"],
        "num_local_experts": 0,
        "shared_intermediate_size": 72,
        "position_embedding_type": None,
    },
    "bamba": {**_MAMBA, "attn_layer_indices": [1, 2]},
    "falcon_h1": {
        **_MAMBA,
        "num_hidden_layers": 2,
        "mamba_d_ssm": 128,
        "embedding_multiplier": 2.5,
        "lm_head_multiplier": 0.4,
        "mlp_multipliers": [0.7, 1.3],
        "key_multiplier": 0.6,
        "attention_in_multiplier": 0.9,
        "attention_out_multiplier": 0.8,
        "ssm_in_multiplier": 1.2,
        "ssm_out_multiplier": 0.7,
        "ssm_multipliers": [0.8, 0.5, 0.9, 1.1, 0.6],
    },
    "mamba": {"state_size": 8, "tie_word_embeddings": True},
    "falcon_mamba": {"state_size": 8, "tie_word_embeddings": True},
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 8, "n_groups": 2, "chunk_size": 16},
    "jamba": {
        "num_hidden_layers": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "mamba_d_state": 8,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
    },
    "nemotron_h": {
        "layers_block_type": ["mamba", "mlp", "attention", "attention", "mlp", "mamba"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 2,
        "chunk_size": 16,
        "head_dim": 16,
        # Transformers keeps dt above it in prompts, but not in later steps.
        "time_step_min": 1e-6,
        "n_routed_experts": 6,
        "moe_intermediate_size": 48,
        "moe_shared_expert_intermediate_size": 72,
        "routed_scaling_factor": 2.5,
    },
    "olmoe": {"num_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 48},
    "flex_olmo": {"num_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 48},
    "lfm2": {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "full_attention", "conv"]},
    "lfm3": {
        "num_hidden_layers": 4,
        "layer_types": ["conv", "full_attention", "conv", "sliding_attention"],
        "head_dim": 16,
        "sliding_window": 20,
    },
    "lfm2_moe": {
        **_EXPERTS,
        "num_hidden_layers": 4,
        "layer_types": ["conv", "full_attention", "conv", "full_attention"],
        "num_dense_layers": 1,
        "routed_scaling_factor": 1.5,
    },
    "qwen3_5_text": _LINEAR,
    "qwen3_5_moe_text": {**_LINEAR, **_EXPERTS, "shared_expert_intermediate_size": 72},
    "qwen3_next": {**_LINEAR, **_EXPERTS, "shared_expert_intermediate_size": 72},
    "apertus": {},
    "arcee": {},
    "ministral": {
        "head_dim": 16,
        "sliding_window": 20,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "ministral3": {
        "head_dim": 24,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 32,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.5,
        },
    },
    "exaone4": {"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"]},
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 16,
        "intermediate_size": 32,
        "sliding_window": 20,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "truncate": False,
        },
    },
    "deepseek_v2": {**_LATENT, "head_dim": 8, "topk_method": "group_limited_greedy"},
    "deepseek_v3": _LATENT,
    "glm4_moe_lite": _LATENT,
    "kimi_linear": {
        **{name: value for name, value in _LATENT.items() if name != "q_lora_rank"},
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "full_attention", "full_attention", "linear_attention"],
        "linear_head_dim": 16,
        "linear_num_heads": 4,
    },
    # Transformers zeroes the embedding of Youtu's padding token while it loads a checkpoint.
    "youtu": {**{name: value for name, value in _LATENT.items() if name not in _ROUTED}, "pad_token_id": None},
    "glm4_moe": {**_ROUTED, "head_dim": 16, "use_qk_norm": True, "routed_scaling_factor": 1.5},
    "dots1": {**_ROUTED, "n_shared_experts": 2, "norm_topk_prob": True},
    "ernie4_5_moe": {
        "head_dim": 16,
        "moe_num_experts": 6,
        "moe_k": 2,
        "moe_intermediate_size": 32,
        "moe_num_shared_experts": 2,
    },
    "hunyuan_v1_dense": {
        "head_dim": 24,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10_000.0, "alpha": 50.0, "factor": 1.0},
    },
    "hunyuan_v1_moe": {"head_dim": 16, "num_experts": 5, "moe_topk": 2, "intermediate_size": 48},
    "minimax_m2": {
        "head_dim": 24,
        "rotary_dim": 16,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "intermediate_size": 48,
    },
    "afmoe": {**_WINDOWED, **_EXPERTS, "num_dense_layers": 1, "num_shared_experts": 2, "route_scale": 1.5},
    "hy_v3": {**_EXPERTS, "num_hidden_layers": 3, "head_dim": 24, "num_shared_experts": 2},
    "laguna": {
        **_WINDOWED,
        **_EXPERTS,
        "num_attention_heads_per_layer": [4, 6, 6, 4],
        "shared_expert_intermediate_size": 72,
        "moe_routed_scaling_factor": 1.5,
    },
    "llama4_text": {
        "num_hidden_layers": 4,
        "head_dim": 16,
        "no_rope_layers": [1, 0, 1, 1],
        "attention_chunk_size": 20,
        "intermediate_size": 48,
        "intermediate_size_mlp": 176,
        "interleave_moe_layer_step": 2,
        "num_local_experts": 5,
        "floor_scale": 16,
        "attn_scale": 0.3,
    },
    "mellum": {**_WINDOWED, **_EXPERTS, "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"]},
    **OWN_CACHE_FAMILIES,
    **FOREIGN_FAMILIES,
    "seed_oss": {"head_dim": 16},
    "ernie4_5": {"head_dim": 16},
    "smollm3": {"num_hidden_layers": 4},
    "glm4": {"head_dim": 16},
    "starcoder2": {"tie_word_embeddings": True},
    "falcon": {"tie_word_embeddings": True, "ffn_hidden_size": 176},
}
FAMILIES = (*_FAMILIES, *PLAIN_FAMILIES)


def small_config(family: str, **overrides: Any) -> dict[str, Any]:
    """The content of config.json of a model that `make_model` would write."""
    if family in PLAIN_FAMILIES:
        return plain_config(family, **overrides)
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return {**_config(family, overrides).to_diff_dict(), "architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]]}


def _config(family: str, overrides: Mapping[str, Any]) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(family, **{**_COMMON, **_FAMILIES[family], **overrides})


def make_model(
    directory: Path,
    family: str = "llama",
    *,
    seed: int = 0,
    dtype: str = "float32",
    max_shard_size: str = "1GB",
    **overrides: Any,
) -> Path:
    """Writes config.json, generation_config.json, weights and tokenizer; gives the directory back.

    `family` is one of `FAMILIES`; `overrides` are fields of its config (`num_hidden_layers=3`,
    `rope_parameters={…}`); a small `max_shard_size` such as "100KB" gives a sharded checkpoint with an index.
    """
    if family in PLAIN_FAMILIES:
        write_plain_model(directory, family, seed, dtype, **overrides)
        write_tokenizer(directory)
        return directory
    import torch
    from transformers import AutoModelForCausalLM

    config = _config(family, overrides)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)  # for what `randomise` leaves as it is
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomise(model, seed)
    model.to(getattr(torch, dtype)).save_pretrained(directory, max_shard_size=max_shard_size)
    if family == "kimi_linear":
        _name_mlps_as_published(directory)
    write_tokenizer(directory, config.vocab_size, config.max_position_embeddings)
    return directory


def _name_mlps_as_published(directory: Path) -> None:
    """Transformers gives single MLPs the prefix of experts when it writes a checkpoint."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(directory / "model.safetensors")
    renamed = {
        re.sub(r"block_sparse_moe\.((gate|up|down)_proj)", r"mlp.\1", name): each for name, each in tensors.items()
    }
    save_file(renamed, directory / "model.safetensors", metadata={"format": "pt"})


def make_inclined_model(directory: Path, inclinations: Mapping[int, float], **overrides: Any) -> Path:
    """As `make_model`, with a bias for single tokens: `inclinations` maps token ids to what is added to their logits.

    The logits of the other tokens differ by a few units. The bias is in the head's weights, beside a component of the
    last norm's output that is always 1.
    """
    from safetensors.torch import load_file, save_file

    make_model(directory, "gpt_neox", **overrides)
    weights = load_file(directory / "model.safetensors")
    norm, head = "gpt_neox.final_layer_norm", weights["embed_out.weight"]
    weights[f"{norm}.weight"][0], weights[f"{norm}.bias"][0] = 0.0, 1.0
    head[:, 0] = 0.0
    for token_id, inclination in inclinations.items():
        head[token_id, 0] = inclination
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def greedy_reference(
    directory: Path, prompt_token_ids: list[int], num_tokens: int, draft: Sequence[int] = ()
) -> list[int]:
    """What transformers, or the plain reference, generates greedily from these ids, ignoring the end of sequence.

    `draft`: what it is expected to be, as the answer that a test compares. It is checked in a single step, in which
    each token of the reference must be the likeliest after the ones before it; where one is not, it counts for nothing.
    """
    if is_plain(directory):
        return plain_greedy(directory, prompt_token_ids, num_tokens, draft)
    import torch

    model = _loaded(directory)
    ids = list(prompt_token_ids)
    with torch.inference_mode():
        if len(draft) == num_tokens > 0:
            logits = model(torch.tensor([[*ids, *draft[:-1]]]), use_cache=False).logits[0, len(ids) - 1 :]
            if logits.argmax(-1).tolist() == list(draft):
                return list(draft)
        step = model(torch.tensor([ids]), use_cache=True)
        for _ in range(num_tokens):
            ids.append(int(step.logits[0, -1].argmax()))
            # Without its position, Bamba takes the token for the first one.
            place = {"position_ids": torch.tensor([[len(ids) - 1]])} if model.config.model_type == "bamba" else {}
            if (cached := getattr(step, "past_key_values", None)) is None:
                step = model(torch.tensor([ids]))  # Mamba's state has another name
            else:
                step = model(torch.tensor([ids[-1:]]), past_key_values=cached, use_cache=True, **place)
    return ids[len(prompt_token_ids) :]


def beam_reference(directory: Path, prompt_token_ids: list[int], ends: list[int], **options: Any) -> list[list[int]]:
    """What transformers' beam search generates, best first, up to and including the first of the tokens `ends`.

    `options` are those of `generate`. The same call for several prompts would pad them.
    """
    import torch

    model, length = _loaded(directory), len(prompt_token_ids)
    with torch.inference_mode():
        found = model.generate(
            torch.tensor([prompt_token_ids]),
            attention_mask=torch.ones(1, length, dtype=torch.int64),
            do_sample=False,
            eos_token_id=ends,
            pad_token_id=-1,
            **options,
        )
    return [[token for token in row if token >= 0] for row in found[:, length:].tolist()]


def reference_log_probabilities(directory: Path, prompts: list[list[int]], dtype: str) -> Any:
    """Of the token after each prompt, float32 [prompts, vocab], by the reference computing in float32 or bfloat16."""
    import torch

    if is_plain(directory):
        return plain_log_probabilities(directory, prompts, rounded=dtype == "bfloat16")
    model = _loaded(directory, dtype)
    with torch.inference_mode():
        logits = torch.stack([model(torch.tensor([ids])).logits[0, -1] for ids in prompts])
    return logits.to(torch.float32).log_softmax(-1)


@functools.lru_cache(maxsize=1)
def _loaded(directory: Path, dtype: str = "auto") -> Any:
    from transformers import AutoModelForCausalLM

    # Falcon's eager attention adds the biases for positions twice.
    biased = json.loads((directory / "config.json").read_text()).get("alibi", False)
    attention = "sdpa" if biased else "eager"
    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation=attention).eval()


def write_tokenizer(directory: Path, vocab_size: int = VOCAB_SIZE, max_length: int = 512) -> None:
    """A byte-level BPE with a few merges, three special tokens and a chat template; every id below the size decodes."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocab, merges = _vocabulary()
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL_TOKENS])
    fillers = range(tokenizer.get_vocab_size(), vocab_size)
    tokenizer.add_tokens([AddedToken(f"<|filler_{i}|>", special=False, normalized=False) for i in fillers])
    assert tokenizer.get_vocab_size() == vocab_size, "the vocabulary is too small for the tokenizer"
    tokenizer.save(str(directory / "tokenizer.json"))
    facts = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|endoftext|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(facts, indent=2))


def _vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Special tokens first, then bytes, then what joining the words left to right needs."""
    from tokenizers import pre_tokenizers

    vocab = {text: i for i, text in enumerate((*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())))}
    merges: list[tuple[str, str]] = []
    splitter = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for word in _MERGED_WORDS:
        letters = splitter.pre_tokenize_str(word)[0][0]
        for end in range(2, len(letters) + 1):
            if letters[:end] not in vocab:
                vocab[letters[:end]] = len(vocab)
                merges.append((letters[: end - 1], letters[end - 1]))
    return vocab, merges


def randomise(model: Any, seed: int) -> None:
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith(("A_log", "dt_bias", ".D")):
                # The decay of a state, which is meaningful in a narrow range only.
                continue
            if parameter.dim() > 1:
                parameter.copy_(
                    noise
                    * (0.1 if "embed" in name or ".wpe" in name or ".wte" in name else 1.2 / parameter.shape[1] ** 0.5)
                )
            else:
                parameter.copy_(noise * 0.1 + (0.0 if name.endswith("bias") else 1.0))
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith("e_score_correction_bias"):
                # As far apart as the scores are, so that both decide which experts are chosen.
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.05)
            elif name.endswith("layer_scalar"):
                tensor.copy_(0.8 + 0.4 * torch.rand(tensor.shape, generator=generator))
