"""Small random models with a layer that predicts further tokens, and what that layer predicts, by a plain reference.

The reference computes whole sequences with transformers' layers and has no cache. The names of the tensors are written
out as checkpoints have them.
"""

import copy
import functools
from pathlib import Path
from typing import Any

from tests.models import make_model, randomise

SCALE = 0.05
_NUMBERED = {
    "layer": "model.layers.{}",
    "input": "model.layers.{}.eh_proj",
    "embedding_norm": "model.layers.{}.enorm",
    "hidden_norm": "model.layers.{}.hnorm",
    "norm": "model.layers.{}.shared_head.norm",
}
_MTP = {
    "layer": "mtp.layers.0",
    "input": "mtp.fc",
    "embedding_norm": "mtp.pre_fc_norm_embedding",
    "hidden_norm": "mtp.pre_fc_norm_hidden",
    "norm": "mtp.norm",
}
_NEMOTRON = {
    "layer": "mtp.layers",
    "input": "mtp.layers.0.eh_proj",
    "embedding_norm": "mtp.layers.0.enorm",
    "hidden_norm": "mtp.layers.0.hnorm",
    "norm": "mtp.layers.1.final_layernorm",
}
DRAFT_FAMILIES: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "qwen3_5_text": (_MTP, {}),
    "qwen3_5_moe_text": (_MTP, {}),
    "qwen3_next": (_MTP, {"linear_value_head_dim": 16}),
    "deepseek_v3": (_NUMBERED, {"n_group": 4, "topk_group": 2, "num_nextn_predict_layers": 1}),
    "glm4_moe": (_NUMBERED, {"num_nextn_predict_layers": 1}),
    "glm4_moe_lite": (_NUMBERED, {"num_nextn_predict_layers": 1}),
    "nemotron_h": (
        _NEMOTRON,
        {"layers_block_type": ["attention", "moe", "mamba", "moe", "mamba", "attention"], "moe_latent_size": 24},
    ),
}
"""Of each family the names of the draft layer's tensors and further fields of the config."""


def make_draft_model(directory: Path, family: str, seed: int = 0, dtype: str = "float32", **overrides: Any) -> Path:
    """As `make_model`, with a draft layer. Copies of shared weights are there too, zeros, and are not to be used."""
    import torch
    from safetensors.torch import load_file, save_file

    names, fields = DRAFT_FAMILIES[family]
    make_model(directory, family, seed=seed, dtype=dtype, **{**fields, **overrides})
    drafter = _new(directory)
    randomise(drafter, seed + 1)
    drafter.to(getattr(torch, dtype))
    path = directory / "model.safetensors"
    weights = load_file(path)
    number = drafter.number
    for name, value in drafter.state_dict().items():
        part, _, rest = name.partition(".")
        prefix = names[part].format(number)
        for stored, tensor in _as_stored(f"{prefix}.{rest}", value):
            weights[stored] = tensor.clone().contiguous()
    if names is _NUMBERED:
        weights[f"model.layers.{number}.embed_tokens.weight"] = torch.zeros_like(weights["model.embed_tokens.weight"])
        weights[f"model.layers.{number}.shared_head.head.weight"] = torch.zeros_like(weights["lm_head.weight"])
    save_file(weights, path, metadata={"format": "pt"})
    drafter_of.cache_clear()
    return directory


def _as_stored(name: str, value: Any) -> list[tuple[str, Any]]:
    """The tensors of a checkpoint in place of those that transformers joins: each expert has its own."""
    first, found, last = name.partition(".experts.")
    if not found:
        return [(name, value)]
    if last != "gate_up_proj":
        return [(f"{first}{found}{i}.{last}.weight", one) for i, one in enumerate(value)]
    return [
        (f"{first}{found}{i}.{part}.weight", half)
        for i, one in enumerate(value)
        for part, half in zip(("gate_proj", "up_proj"), one.chunk(2), strict=True)
    ]


def _new(directory: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto", attn_implementation="eager").eval()
    base: Any = model.get_decoder()
    head: Any = model.get_output_embeddings()
    config, embed = copy.deepcopy(model.config), model.get_input_embeddings()
    rotary: Any = getattr(base, "rotary_emb", None)
    number = config.num_hidden_layers
    config.num_hidden_layers = 1
    config.first_k_dense_replace = 0
    if getattr(config, "layer_types", None):
        config.layer_types = ["full_attention"]
    if getattr(config, "mlp_layer_types", None):
        config.mlp_layer_types = ["sparse"]
    norm: Any = type(base.norm_f if hasattr(base, "norm_f") else base.norm)
    eps = getattr(config, "rms_norm_eps", None) or config.layer_norm_epsilon

    class Drafter(torch.nn.Module):
        """The draft layer with its norms; its parameters alone are those of this module."""

        def __init__(self) -> None:
            super().__init__()
            size = config.hidden_size
            self.layer = _layer(type(base.layers[-1]), config)
            self.input = torch.nn.Linear(2 * size, size, bias=False)
            self.embedding_norm, self.hidden_norm, self.norm = (norm(size, eps=eps) for _ in range(3))
            self.number = number
            self.models = [model]  # a list, so that its parameters are not this module's

        @torch.inference_mode()
        def draft(self, ids: list[int], count: int) -> list[int]:
            """The `count` tokens that are predicted after `ids`, whose last one was just sampled."""
            hidden = base(torch.tensor([ids[:-1]]), use_cache=False).last_hidden_state
            drafts: list[int] = []
            for _ in range(count):
                known = torch.tensor([[*ids, *drafts]])
                embedded = embed(known[:, 1:])
                x = self.input(torch.cat((self.embedding_norm(embedded), self.hidden_norm(hidden)), dim=-1))
                length = x.shape[1]
                positions = torch.arange(length)[None]
                mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
                x = self.layer(
                    x,
                    position_embeddings=None if rotary is None else rotary(x, positions),
                    attention_mask=mask,
                    position_ids=positions,
                )
                x = self.norm(x[0] if isinstance(x, tuple) else x)
                drafts.append(int(head(x[:, -1]).argmax()))
                hidden = torch.cat((hidden, x[:, -1:]), dim=1)
            return drafts

    return Drafter().eval()


def _layer(kind: Any, config: Any) -> Any:
    """The draft layer; of Nemotron H two, one after the other."""
    import torch

    if config.model_type != "nemotron_h":
        return kind(config, 0)
    config.layers_block_type = ["full_attention", "moe"]

    class Both(torch.nn.ModuleList):
        def forward(self, x: Any, attention_mask: Any, **others: Any) -> Any:
            attention, experts = self
            return experts(attention(x, attention_mask=attention_mask))

    return Both([kind(config, 0), kind(config, 1)])


@functools.lru_cache(maxsize=2)
def drafter_of(directory: Path) -> Any:
    """The reference of a model that `make_draft_model` has written, with the weights from its files."""
    import torch
    from safetensors.torch import load_file

    drafter, weights = _new(directory), load_file(directory / "model.safetensors")
    family = next(name for name in DRAFT_FAMILIES if drafter.models[0].config.model_type == name)
    names = DRAFT_FAMILIES[family][0]
    state = drafter.state_dict()
    for name, value in state.items():
        part, _, rest = name.partition(".")
        stored = [weights[each] for each, _ in _as_stored(f"{names[part].format(drafter.number)}.{rest}", value)]
        if len(stored) > 1 and rest.endswith("gate_up_proj"):
            stored = [torch.cat(pair) for pair in zip(stored[::2], stored[1::2], strict=True)]
        state[name] = torch.stack(stored) if ".experts." in name else stored[0]
    drafter.load_state_dict(state)
    return drafter


def make_prophet(directory: Path, family: str, share: float = 1.0) -> Path:
    """A model whose next token follows from the last one alone, and whose draft layer knows it for a `share` of them.

    No layer changes the residual stream; the draft layer passes the embedding of the next token on to the head.
    """
    import torch
    from safetensors.torch import load_file, save_file

    make_draft_model(directory, family)
    names, path = DRAFT_FAMILIES[family][0], directory / "model.safetensors"
    weights, generator = load_file(path), torch.Generator().manual_seed(1)
    plain = 0.0 if family.startswith("qwen") else 1.0
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")):
            weight.zero_()
        if "norm" in name and weight.dim() == 1:
            weight.fill_(plain)
    [joined] = (name for name in weights if name.endswith(("mtp.fc.weight", "eh_proj.weight")))
    size = weights[joined].shape[0]
    weights[joined] = torch.cat((torch.eye(size), torch.zeros(size, size)), dim=1)
    assert names["input"].rpartition(".")[2] in joined
    if share < 1.0:
        # Some of the tokens are told as another one.
        noise = torch.randn(size, size, generator=generator) * (1.0 - share) * size**-0.5 * 1.2
        weights[joined][:, :size] += noise
    save_file(weights, path, metadata={"format": "pt"})
    drafter_of.cache_clear()
    return directory
