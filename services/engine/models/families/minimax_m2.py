"""MiniMax M2: experts in every layer, chosen by corrected sigmoids; one norm for all query heads, one for all keys.

Rotary embedding is on the first part of each head.
"""

from antiphon.services.engine.models.about import About
from antiphon.services.engine.models.config_fields import Config, integer, llama_like, optional_number
from antiphon.services.engine.models.description import DecoderDescription, Experts
from antiphon.services.engine.models.layout import Names, named_layout

ARCHITECTURES = ("MiniMaxM2ForCausalLM",)
ABOUT = About(tools=("minimax_m2",), reasoning=("qwen3",))
layout = named_layout(
    Names(
        router="block_sparse_moe.gate",
        correction="block_sparse_moe.e_score_correction_bias",
        expert_up=("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
        expert_down="block_sparse_moe.experts.{}.w2",
    )
)
_HEAD_DIM = 128


def describe(config: Config) -> DecoderDescription:
    """Returns the description. `intermediate_size` is the size of one expert; `rotary_dim` the part that is rotated."""
    head_dim, num_layers = integer(config, "head_dim", _HEAD_DIM), integer(config, "num_hidden_layers")
    fields = {**config, "head_dim": head_dim}
    if optional_number(config, "rotary_dim") is not None:
        fields = {"partial_rotary_factor": integer(config, "rotary_dim") / head_dim, **fields}
    experts = Experts(
        num_experts=integer(config, "num_local_experts"),
        num_per_token=integer(config, "num_experts_per_tok"),
        intermediate_size=integer(config, "intermediate_size"),
        layers=frozenset(range(num_layers)),
        normalise=True,
        scoring="sigmoid",
        correction=True,
    )
    return llama_like(fields, "minimax_m2", qk_norm=True, whole_qk_norm=True, experts=experts)
