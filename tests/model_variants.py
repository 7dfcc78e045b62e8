"""The configurations that parity is tested with, beyond Llama's nearest relatives: (family, fields of its config)."""

from typing import Any

MORE_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {}),
    "mixtral with a window": ("mixtral", {"sliding_window": 20}),
    "qwen2 with experts": ("qwen2_moe", {}),
    "qwen2 with experts in some layers": (
        "qwen2_moe",
        {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3], "norm_topk_prob": True},
    ),
    "qwen3 with experts": ("qwen3_moe", {"norm_topk_prob": True}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {"num_hidden_layers": 3}),
    "gemma2 without caps": ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma2 with low caps": ("gemma2", {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma3": ("gemma3_text", {"layer_types": ["sliding_attention", "full_attention"]}),
    "gemma3 with stretched positions": (
        "gemma3_text",
        {
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            },
        },
    ),
    "phi3": ("phi3", {"sliding_window": 24}),
    "phi3, longrope positions": (
        "phi3",
        {
            "original_max_position_embeddings": 256,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.5, 3.1, 4.0],
                "long_factor": [2.0, 2.1, 2.3, 2.6, 3.0, 3.5, 4.1, 5.0],
            },
        },
    ),
    "glm": ("glm", {}),
    "glm4": ("glm4", {}),
    "seed_oss with more biases": ("seed_oss", {"attention_out_bias": True, "mlp_bias": True}),
    "ernie4_5 tied, with biases": ("ernie4_5", {"use_bias": True, "tie_word_embeddings": True}),
    "smollm3": ("smollm3", {}),
    "smollm3 with windows": (
        "smollm3",
        {"use_sliding_window": True, "sliding_window": 20, "no_rope_layers": [0, 1, 1, 0], "attention_bias": True},
    ),
    "smollm3, a last layer that sees far": (
        "smollm3",
        {
            "use_sliding_window": True,
            "sliding_window": 20,
            "no_rope_layers": [1, 1, 1, 0],
            "layer_types": [*["sliding_attention"] * 3, "full_attention"],
        },
    ),
    "gpt_neox": ("gpt_neox", {}),
    "gpt_neox, one part after the other": ("gpt_neox", {"use_parallel_residual": False, "attention_bias": False}),
    "gpt2": ("gpt2", {}),
    "opt": ("opt", {}),
    "opt without biases": ("opt", {"enable_bias": False}),
    "starcoder2": ("starcoder2", {"sliding_window": 24}),
    "falcon": ("falcon", {}),
    "falcon, new architecture": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}),
    "falcon, new architecture with one norm": (
        "falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    ),
    "falcon with biases for positions": (
        "falcon",
        {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True},
    ),
    "qwen": ("qwen", {}),
    "qwen that stretches": ("qwen", {"use_dynamic_ntk": True, "use_logn_attn": True, "seq_length": 256}),
    "internlm2": ("internlm2", {}),
    "internlm2 with biases": ("internlm2", {"bias": True, "rope_theta": 1000.0}),
    "baichuan 7B": ("baichuan", {}),
    "baichuan 13B": ("baichuan", {"max_position_embeddings": None, "num_attention_heads": 6, "hidden_size": 96}),
    "baichuan2 13B": ("baichuan", {"max_position_embeddings": None, "z_loss_weight": 0}),
    "chatglm": ("chatglm", {}),
    "chatglm for long contexts": ("chatglm", {"rope_ratio": 50, "add_bias_linear": True}),
}
MORE_VARIANTS.update(
    {
        "olmo2": ("olmo2", {}),
        "olmo3": ("olmo3", {}),
        "olmo3 with stretched positions": (
            "olmo3",
            {
                "rope_parameters": {
                    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
                    "full_attention": {
                        "rope_type": "yarn",
                        "rope_theta": 10_000.0,
                        "factor": 4.0,
                        "original_max_position_embeddings": 128,
                    },
                },
            },
        ),
        "granite": ("granite", {}),
        "exaone4": ("exaone4", {}),
        "exaone4 without windows": (
            "exaone4",
            {"sliding_window": None, "layer_types": ["full_attention", "full_attention"]},
        ),
        "cohere2": ("cohere2", {}),
    }
)
MORE_VARIANTS.update(
    {
        "glm4 with experts": ("glm4_moe", {}),
        "glm4 with experts, without groups": (
            "glm4_moe",
            {"n_group": 1, "use_qk_norm": False, "attention_bias": True, "norm_topk_prob": False},
        ),
        "dots1": ("dots1", {}),
        "dots1 with a window": ("dots1", {"sliding_window": 20, "max_window_layers": 1, "attention_bias": True}),
        "ernie4_5 with experts": ("ernie4_5_moe", {}),
        "ernie4_5 with experts in some layers": (
            "ernie4_5_moe",
            {"num_hidden_layers": 4, "moe_layer_interval": 2, "moe_layer_end_index": 2, "moe_num_shared_experts": 0},
        ),
        "minimax_m2": ("minimax_m2", {}),
        "hunyuan": ("hunyuan_v1_dense", {}),
        "hunyuan with experts": ("hunyuan_v1_moe", {}),
        "gpt_oss": ("gpt_oss", {}),
        "gpt_oss without groups": ("gpt_oss", {"num_key_value_heads": 4, "num_local_experts": 6}),
    }
)
LATENT_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v2": ("deepseek_v2", {}),
    "deepseek_v2 lite": (
        "deepseek_v2",
        {"q_lora_rank": None, "topk_method": "greedy", "routed_scaling_factor": 1.5, "n_shared_experts": 2},
    ),
    "deepseek_v3": ("deepseek_v3", {"n_group": 4, "topk_group": 2}),
    "deepseek_v3 with stretched positions": (
        "deepseek_v3",
        {
            "q_lora_rank": None,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10_000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
        },
    ),
    "deepseek_v3 with wide latents": ("deepseek_v3", {"kv_lora_rank": 32, "attention_bias": True}),
    "glm4_moe_lite": ("glm4_moe_lite", {}),
    "youtu": ("youtu", {}),
}
"""Latent attention. PyTorch's operations expand wide latents for chunks of a prompt; the others they do not."""
MORE_VARIANTS.update(LATENT_VARIANTS)
FOREIGN_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "cohere": ("cohere", {}),
    "cohere, untied": ("cohere", {"tie_word_embeddings": False}),
}
"""Architectures without a family here."""
TORCH_VARIANTS = tuple(FOREIGN_VARIANTS)
"""Variants that only PyTorch's operations compute."""
MORE_VARIANTS.update(FOREIGN_VARIANTS)
MORE_FAMILY_VARIANTS = (
    *FOREIGN_VARIANTS,
    "deepseek_v2",
    "deepseek_v3 with wide latents",
    "youtu",
    "glm4 with experts",
    "dots1",
    "ernie4_5 with experts",
    "minimax_m2",
    "hunyuan",
    "hunyuan with experts",
    "gpt_oss",
    "olmo2",
    "granite",
    "exaone4",
    "cohere2",
    "mixtral",
    "qwen2 with experts",
    "qwen3 with experts",
    "gemma",
    "gemma2",
    "gemma3",
    "phi3",
    "glm",
    "glm4",
    "smollm3 with windows",
    "ernie4_5 tied, with biases",
    "gpt_neox",
    "gpt2",
    "opt",
    "starcoder2",
    "falcon, new architecture",
    "falcon with biases for positions",
    "qwen",
    "internlm2",
    "baichuan 7B",
    "baichuan2 13B",
    "chatglm",
)
