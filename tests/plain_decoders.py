"""Plain references for architectures that transformers has no class for: the whole sequence anew for each token.

Written from the architectures' descriptions, sharing nothing with the engine: one function a family, dense causal
attention over [heads, tokens, head_dim], no cache. Also writes random checkpoints with the families' tensor names.
"""

import functools
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

Weights = dict[str, Tensor]
Config = dict[str, Any]

_VOCAB, _EOS = 331, 2
_COMMON: Config = {
    "vocab_size": _VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 176,
    "max_position_embeddings": 512,
    "eos_token_id": _EOS,
    "torch_dtype": "float32",
}
_CONFIGS: dict[str, Config] = {
    "qwen": {
        "architectures": ["QWenLMHeadModel"],
        "kv_channels": 16,
        "layer_norm_epsilon": 1e-6,
        "rotary_emb_base": 10000,
        "rotary_pct": 1.0,
        "seq_length": 512,
        "intermediate_size": 352,
        "no_bias": True,
    },
    "internlm2": {
        "architectures": ["InternLM2ForCausalLM"],
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000,
        "bias": False,
    },
    "baichuan": {"architectures": ["BaichuanForCausalLM"], "rms_norm_eps": 1e-6, "model_max_length": 512},
    "chatglm": {
        "architectures": ["ChatGLMModel"],
        "padded_vocab_size": _VOCAB,
        "num_layers": 2,
        "ffn_hidden_size": 176,
        "kv_channels": 16,
        "multi_query_attention": True,
        "multi_query_group_num": 2,
        "layernorm_epsilon": 1e-5,
        "seq_length": 512,
        "add_qkv_bias": True,
        "add_bias_linear": False,
        "rmsnorm": True,
        "post_layer_norm": True,
    },
}
PLAIN_FAMILIES = tuple(_CONFIGS)


def plain_config(family: str, **overrides: Any) -> Config:
    """config.json of a model of one of these families."""
    config = {**_COMMON, **_CONFIGS[family], **overrides}
    return {name: value for name, value in config.items() if value is not None}


def write_plain_model(directory: Path, family: str, seed: int, dtype: str, **overrides: Any) -> None:
    """config.json, generation_config.json and model.safetensors."""
    config = plain_config(family, **{"torch_dtype": dtype, **overrides})
    generator = torch.Generator().manual_seed(seed)
    tensors: Weights = {}
    for name, shape in _SHAPES[family](config).items():
        noise = torch.randn(shape, generator=generator)
        if len(shape) > 1:
            noise *= 0.1 if "embed" in name or "wte" in name else 1.2 / shape[1] ** 0.5
        else:
            noise = noise * 0.1 + (not name.endswith("bias"))
        tensors[name] = noise.to(getattr(torch, dtype))
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": _EOS}))


def is_plain(directory: Path) -> bool:
    """Whether a directory holds a model of these families."""
    return _family_of(json.loads((directory / "config.json").read_text())) is not None


def plain_greedy(directory: Path, prompt_token_ids: list[int], num_tokens: int, draft: Sequence[int] = ()) -> list[int]:
    """The likeliest tokens, one after the other. `draft`: see `greedy_reference`."""
    config, tensors = _read(directory)
    family = _family_of(config)
    assert family is not None
    ids = list(prompt_token_ids)
    with torch.inference_mode():
        if len(draft) == num_tokens > 0:
            logits = _LOGITS[family](config, tensors, torch.tensor([*ids, *draft[:-1]]))[len(ids) - 1 :]
            if logits.argmax(-1).tolist() == list(draft):
                return list(draft)
        for _ in range(num_tokens):
            ids.append(int(_LOGITS[family](config, tensors, torch.tensor(ids))[-1].argmax()))
    return ids[len(prompt_token_ids) :]


def plain_log_probabilities(directory: Path, prompts: list[list[int]], rounded: bool) -> Tensor:
    """Of the token after each prompt, [prompts, vocab]; the weights in float32.

    `rounded`: matrices are multiplied in bfloat16, as autocast does: it rounds what they read and what they give. The
    residual stream, norms and angles stay in float32.
    """
    config, tensors = _read(directory)
    family = _family_of(config)
    assert family is not None
    weights = {name: tensor.to(torch.float32) for name, tensor in tensors.items()}
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16, enabled=rounded):
        rows = [_LOGITS[family](config, weights, torch.tensor(ids))[-1] for ids in prompts]
    return torch.stack(rows).to(torch.float32).log_softmax(-1)


@functools.lru_cache(maxsize=2)
def _read(directory: Path) -> tuple[Config, Weights]:
    return json.loads((directory / "config.json").read_text()), load_file(directory / "model.safetensors")


def _family_of(config: Config) -> str | None:
    known = {fields["architectures"][0]: family for family, fields in _CONFIGS.items()}
    return known.get(config["architectures"][0])


# --- parts ------------------------------------------------------------------------------------------------------------


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def _angles(length: int, dims: int, base: float) -> Tensor:
    return torch.outer(torch.arange(length).float(), base ** (-torch.arange(0, dims, 2).float() / dims))


def _turn_halves(x: Tensor, base: float) -> Tensor:
    """X [tokens, heads, dims]; dimension i turns with i + dims / 2."""
    angles = _angles(x.shape[0], x.shape[-1], base)[:, None]
    left, right = x.chunk(2, -1)
    return torch.cat((left * angles.cos() - right * angles.sin(), right * angles.cos() + left * angles.sin()), dim=-1)


def _turn_pairs(x: Tensor, dims: int, base: float) -> Tensor:
    """The first `dims` of x [tokens, heads, any]; dimension 2i turns with 2i + 1."""
    angles = _angles(x.shape[0], dims, base)[:, None]
    pairs = torch.view_as_complex(x[..., :dims].float().reshape(*x.shape[:-1], -1, 2).contiguous())
    turned = torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)
    return torch.cat((turned, x[..., dims:]), dim=-1)


def _attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
    """Q [tokens, heads, dims], k and v [tokens, kv_heads, dims], bias [heads, 1, tokens] → [tokens, heads * dims]."""
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1])
    if bias is not None:
        scores = scores + bias
    hidden = torch.ones(q.shape[0], q.shape[0], dtype=torch.bool).triu(1)
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v).flatten(1)


def _slopes(heads: int) -> list[float]:
    """The published recipe, in its recursive form."""
    if math.log2(heads).is_integer():
        start = 2 ** (-(2 ** -(math.log2(heads) - 3)))
        return [start * start**i for i in range(heads)]
    lower = 2 ** math.floor(math.log2(heads))
    return _slopes(lower) + _slopes(2 * lower)[0::2][: heads - lower]


# --- families ---------------------------------------------------------------------------------------------------------


def _qwen_shapes(c: Config) -> dict[str, tuple[int, ...]]:
    h, inner = c["hidden_size"], c["intermediate_size"] // 2
    shapes: dict[str, tuple[int, ...]] = {"transformer.wte.weight": (_VOCAB, h), "lm_head.weight": (_VOCAB, h)}
    shapes["transformer.ln_f.weight"] = (h,)
    for i in range(c["num_hidden_layers"]):
        p = f"transformer.h.{i}"
        shapes |= {f"{p}.ln_1.weight": (h,), f"{p}.ln_2.weight": (h,)}
        shapes |= {f"{p}.attn.c_attn.weight": (3 * h, h), f"{p}.attn.c_attn.bias": (3 * h,)}
        shapes |= {f"{p}.attn.c_proj.weight": (h, h), f"{p}.mlp.c_proj.weight": (h, inner)}
        shapes |= {f"{p}.mlp.w1.weight": (inner, h), f"{p}.mlp.w2.weight": (inner, h)}
    return shapes


def _qwen(c: Config, w: Weights, ids: Tensor) -> Tensor:
    heads, eps = c["num_attention_heads"], c["layer_norm_epsilon"]
    x = w["transformer.wte.weight"][ids]
    for i in range(c["num_hidden_layers"]):
        p = f"transformer.h.{i}"
        packed = F.linear(_rms(x, w[f"{p}.ln_1.weight"], eps), w[f"{p}.attn.c_attn.weight"], w[f"{p}.attn.c_attn.bias"])
        q, k, v = (part.unflatten(-1, (heads, -1)) for part in packed.split(c["hidden_size"], dim=-1))
        attended = _attend(_turn_halves(q, c["rotary_emb_base"]), _turn_halves(k, c["rotary_emb_base"]), v)
        x = x + attended @ w[f"{p}.attn.c_proj.weight"].T
        y = _rms(x, w[f"{p}.ln_2.weight"], eps)
        inner = (y @ w[f"{p}.mlp.w1.weight"].T) * F.silu(y @ w[f"{p}.mlp.w2.weight"].T)
        x = x + inner @ w[f"{p}.mlp.c_proj.weight"].T
    return _rms(x, w["transformer.ln_f.weight"], eps) @ w["lm_head.weight"].T


def _internlm2_shapes(c: Config) -> dict[str, tuple[int, ...]]:
    h, inner = c["hidden_size"], c["intermediate_size"]
    packed = (c["num_attention_heads"] + 2 * c["num_key_value_heads"]) * h // c["num_attention_heads"]
    shapes: dict[str, tuple[int, ...]] = {"model.tok_embeddings.weight": (_VOCAB, h), "output.weight": (_VOCAB, h)}
    shapes["model.norm.weight"] = (h,)
    for i in range(c["num_hidden_layers"]):
        p = f"model.layers.{i}"
        shapes |= {f"{p}.attention_norm.weight": (h,), f"{p}.ffn_norm.weight": (h,)}
        shapes |= {f"{p}.attention.wqkv.weight": (packed, h), f"{p}.attention.wo.weight": (h, h)}
        if c["bias"]:
            shapes |= {f"{p}.attention.wqkv.bias": (packed,), f"{p}.attention.wo.bias": (h,)}
        shapes |= {f"{p}.feed_forward.{name}.weight": (inner, h) for name in ("w1", "w3")}
        shapes[f"{p}.feed_forward.w2.weight"] = (h, inner)
    return shapes


def _internlm2(c: Config, w: Weights, ids: Tensor) -> Tensor:
    eps, kv_heads = c["rms_norm_eps"], c["num_key_value_heads"]
    dims = c["hidden_size"] // c["num_attention_heads"]
    x = w["model.tok_embeddings.weight"][ids]
    for i in range(c["num_hidden_layers"]):
        p = f"model.layers.{i}"
        y = _rms(x, w[f"{p}.attention_norm.weight"], eps)
        packed = F.linear(y, w[f"{p}.attention.wqkv.weight"], w.get(f"{p}.attention.wqkv.bias"))
        groups = packed.view(len(ids), kv_heads, -1, dims)
        q, k, v = groups[:, :, :-2].flatten(1, 2), groups[:, :, -2], groups[:, :, -1]
        attended = _attend(_turn_halves(q, c["rope_theta"]), _turn_halves(k, c["rope_theta"]), v)
        x = x + F.linear(attended, w[f"{p}.attention.wo.weight"], w.get(f"{p}.attention.wo.bias"))
        y = _rms(x, w[f"{p}.ffn_norm.weight"], eps)
        gate, up, down = (w[f"{p}.feed_forward.{name}.weight"] for name in ("w1", "w3", "w2"))
        x = x + (F.silu(y @ gate.T) * (y @ up.T)) @ down.T
    return _rms(x, w["model.norm.weight"], eps) @ w["output.weight"].T


def _baichuan_shapes(c: Config) -> dict[str, tuple[int, ...]]:
    h, inner = c["hidden_size"], c["intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (_VOCAB, h), "lm_head.weight": (_VOCAB, h)}
    shapes["model.norm.weight"] = (h,)
    for i in range(c["num_hidden_layers"]):
        p = f"model.layers.{i}"
        shapes |= {f"{p}.input_layernorm.weight": (h,), f"{p}.post_attention_layernorm.weight": (h,)}
        shapes |= {f"{p}.self_attn.W_pack.weight": (3 * h, h), f"{p}.self_attn.o_proj.weight": (h, h)}
        shapes |= {f"{p}.mlp.{name}_proj.weight": (inner, h) for name in ("gate", "up")}
        shapes[f"{p}.mlp.down_proj.weight"] = (h, inner)
    return shapes


def _baichuan(c: Config, w: Weights, ids: Tensor) -> Tensor:
    eps, heads, turns = c["rms_norm_eps"], c["num_attention_heads"], "max_position_embeddings" in c
    bias = None if turns else torch.tensor(_slopes(heads))[:, None, None] * torch.arange(len(ids))
    x = w["model.embed_tokens.weight"][ids]
    for i in range(c["num_hidden_layers"]):
        p = f"model.layers.{i}"
        packed = _rms(x, w[f"{p}.input_layernorm.weight"], eps) @ w[f"{p}.self_attn.W_pack.weight"].T
        q, k, v = packed.view(len(ids), 3, heads, -1).unbind(1)
        if turns:
            q, k = _turn_halves(q, 10000.0), _turn_halves(k, 10000.0)
        x = x + _attend(q, k, v, bias) @ w[f"{p}.self_attn.o_proj.weight"].T
        y = _rms(x, w[f"{p}.post_attention_layernorm.weight"], eps)
        gate, up, down = (w[f"{p}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        x = x + (F.silu(y @ gate.T) * (y @ up.T)) @ down.T
    head = w["lm_head.weight"]
    if "z_loss_weight" in c:
        head = head / head.norm(dim=1, keepdim=True)
    return _rms(x, w["model.norm.weight"], eps) @ head.T


def _chatglm_shapes(c: Config) -> dict[str, tuple[int, ...]]:
    h, inner = c["hidden_size"], c["ffn_hidden_size"]
    packed = h + 2 * c["multi_query_group_num"] * c["kv_channels"]
    shapes: dict[str, tuple[int, ...]] = {
        "transformer.embedding.word_embeddings.weight": (_VOCAB, h),
        "transformer.output_layer.weight": (_VOCAB, h),
        "transformer.encoder.final_layernorm.weight": (h,),
        "transformer.rotary_pos_emb.inv_freq": (4,),
    }
    for i in range(c["num_layers"]):
        p = f"transformer.encoder.layers.{i}"
        shapes |= {f"{p}.input_layernorm.weight": (h,), f"{p}.post_attention_layernorm.weight": (h,)}
        shapes |= {
            f"{p}.self_attention.query_key_value.weight": (packed, h),
            f"{p}.mlp.dense_4h_to_h.weight": (h, inner),
        }
        shapes |= {f"{p}.self_attention.query_key_value.bias": (packed,), f"{p}.self_attention.dense.weight": (h, h)}
        shapes[f"{p}.mlp.dense_h_to_4h.weight"] = (2 * inner, h)
        if c["add_bias_linear"]:
            shapes |= {f"{p}.self_attention.dense.bias": (h,), f"{p}.mlp.dense_h_to_4h.bias": (2 * inner,)}
            shapes[f"{p}.mlp.dense_4h_to_h.bias"] = (h,)
    return shapes


def _chatglm(c: Config, w: Weights, ids: Tensor) -> Tensor:
    eps, dims, groups = c["layernorm_epsilon"], c["kv_channels"], c["multi_query_group_num"]
    base = 10000.0 * c.get("rope_ratio", 1)

    def linear(name: str, x: Tensor) -> Tensor:
        return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))

    x = w["transformer.embedding.word_embeddings.weight"][ids]
    for i in range(c["num_layers"]):
        p = f"transformer.encoder.layers.{i}"
        packed = linear(f"{p}.self_attention.query_key_value", _rms(x, w[f"{p}.input_layernorm.weight"], eps))
        q, k, v = packed.split((c["hidden_size"], groups * dims, groups * dims), dim=-1)
        q, k, v = (part.unflatten(-1, (-1, dims)) for part in (q, k, v))
        attended = _attend(_turn_pairs(q, dims // 2, base), _turn_pairs(k, dims // 2, base), v)
        x = x + linear(f"{p}.self_attention.dense", attended)
        y = linear(f"{p}.mlp.dense_h_to_4h", _rms(x, w[f"{p}.post_attention_layernorm.weight"], eps))
        gate, up = y.chunk(2, dim=-1)
        x = x + linear(f"{p}.mlp.dense_4h_to_h", F.silu(gate) * up)
    return _rms(x, w["transformer.encoder.final_layernorm.weight"], eps) @ w["transformer.output_layer.weight"].T


_SHAPES: dict[str, Callable[[Config], dict[str, tuple[int, ...]]]] = {
    "qwen": _qwen_shapes,
    "internlm2": _internlm2_shapes,
    "baichuan": _baichuan_shapes,
    "chatglm": _chatglm_shapes,
}
_LOGITS: dict[str, Callable[[Config, Weights, Tensor], Tensor]] = {
    "qwen": _qwen,
    "internlm2": _internlm2,
    "baichuan": _baichuan,
    "chatglm": _chatglm,
}
