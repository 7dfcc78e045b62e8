"""Configurations whose sizes fit no vector, panel or tile: (family, fields of its config)."""

from typing import Any

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "heads of 6 dimensions": (
        "llama",
        {
            "hidden_size": 51,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "head_dim": 6,
            "intermediate_size": 37,
            "vocab_size": 333,
        },
    ),
    "36 heads in a group": (
        "qwen3",
        {
            "hidden_size": 33,
            "num_attention_heads": 36,
            "num_key_value_heads": 1,
            "head_dim": 10,
            "intermediate_size": 65,
            "attention_bias": True,
        },
    ),
    "heads of 136 dimensions": (
        "qwen3",
        {
            "hidden_size": 70,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 136,
            "intermediate_size": 45,
            "vocab_size": 352,
        },
    ),
    "caps, windows and four norms": (
        "gemma2",
        {
            "hidden_size": 54,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 18,
            "intermediate_size": 65,
            "num_hidden_layers": 3,
            "attn_logit_softcapping": 5.0,
        },
    ),
    "experts beside a shared one": (
        "qwen2_moe",
        {
            "hidden_size": 54,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 21,
            "shared_expert_intermediate_size": 35,
        },
    ),
    "experts alone": (
        "mixtral",
        {
            "hidden_size": 40,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "num_local_experts": 9,
            "intermediate_size": 33,
            # With this one no router has to choose between two that are nearly equal: it would be a matter of rounding.
            "seed": 1,
        },
    ),
    "biases for positions": (
        "falcon",
        {
            "alibi": True,
            "multi_query": False,
            "parallel_attn": False,
            "bias": True,
            "hidden_size": 84,
            "num_attention_heads": 6,
            "ffn_hidden_size": 70,
        },
    ),
    "parallel parts": (
        "gpt_neox",
        {"hidden_size": 60, "num_attention_heads": 5, "rotary_pct": 0.5, "intermediate_size": 75},
    ),
    "learned positions": ("gpt2", {"hidden_size": 42, "num_attention_heads": 3}),
    "pairs side by side": (
        "glm",
        {
            "hidden_size": 56,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 28,
            "intermediate_size": 41,
        },
    ),
    "heads of whole panels": (
        "qwen3",
        {
            "hidden_size": 70,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "intermediate_size": 1100,
            "attention_bias": True,
            "max_position_embeddings": 1024,
        },
    ),
    "a key head for each query head": (
        "gemma2",
        {
            "hidden_size": 60,
            "num_attention_heads": 20,
            "num_key_value_heads": 20,
            "head_dim": 72,
            "intermediate_size": 65,
            "attn_logit_softcapping": 5.0,
            "seed": 1,
        },
    ),
    "latents": (
        "deepseek_v3",
        {
            "hidden_size": 56,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "kv_lora_rank": 20,
            "q_lora_rank": 11,
            "qk_nope_head_dim": 7,
            "qk_rope_head_dim": 6,
            "v_head_dim": 5,
        },
    ),
    "latents of many heads": (
        "deepseek_v2",
        {
            "hidden_size": 74,
            "num_attention_heads": 37,
            "num_key_value_heads": 37,
            "kv_lora_rank": 80,
            "q_lora_rank": None,
            "qk_nope_head_dim": 33,
            "qk_rope_head_dim": 16,
            "v_head_dim": 18,
            "topk_method": "greedy",
        },
    ),
    "a wide MLP": ("llama", {"intermediate_size": 1100, "max_position_embeddings": 1024}),
}
