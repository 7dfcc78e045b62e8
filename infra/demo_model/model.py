"""The training model: a plain Llama decoder whose parameter names are those of HF.

Layers may see a window of the last tokens only, and layers without positions see everything (HF calls this SmolLM3).

The server does not use this implementation. Its only key/value cache is the simple one in ``generate.py``; it has no
quantization. Called by ``train.py``, ``generate.py`` and ``export.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """The sizes of the network, named as in an HF ``config.json``."""

    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 768
    num_hidden_layers: int = 6
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 2048
    #: The number of tokens that a layer with positions sees, its own included; None: all.
    sliding_window: int | None = None
    #: For each layer 1, or 0 if it has no positions, and no window either; empty: all layers have positions.
    no_rope_layers: tuple[int, ...] = ()

    def sees_far(self, layer: int) -> bool:
        """Whether a layer has neither positions nor a window."""
        return bool(self.no_rope_layers) and not self.no_rope_layers[layer]


#: The number of tokens that the layers of the demo model with positions see.
WINDOW = 512
#: By name. The demo model is the near one with a last layer that sees far (``agents/``). The large one has the layers
#: of Qwen2 0.5B; ``bench/quality.py`` measures with it what rounding costs.
SHAPES = {
    "demo": Shape(
        num_hidden_layers=7,
        max_position_embeddings=32768,
        sliding_window=WINDOW,
        no_rope_layers=(1, 1, 1, 1, 1, 1, 0),
    ),
    "near": Shape(),
    "qwen2-0.5b": Shape(
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
    ),
}


def rope_tables(shape: Shape, length: int, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    """Cosines and sines of rotary angles, each ``[length, head_dim]``."""
    steps = torch.arange(0, shape.head_dim, 2, dtype=torch.float32, device=device) / shape.head_dim
    angles = torch.outer(torch.arange(length, dtype=torch.float32, device=device), shape.rope_theta**-steps)
    doubled = torch.cat((angles, angles), dim=-1)
    return doubled.cos(), doubled.sin()


def document_mask(owner: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to attention scores: 0 for earlier positions of the same document, minus infinity for others.

    ``owner`` is ``[rows, length]``, the mask ``[rows, 1, length, length]``.
    """
    length = owner.shape[1]
    seen = torch.ones(length, length, dtype=torch.bool, device=owner.device).tril()
    seen = seen & (owner[:, None, :, None] == owner[:, None, None, :])
    return torch.zeros(seen.shape, dtype=dtype, device=owner.device).masked_fill_(~seen, float("-inf"))


def within_window(mask: Tensor, window: int, first: int = 0) -> Tensor:
    """A mask ``[…, queries, keys]`` without the keys before the window; the first query is at position ``first``."""
    queries = torch.arange(first, first + mask.shape[-2], device=mask.device)
    hidden = torch.arange(mask.shape[-1], device=mask.device) <= queries[:, None] - window
    return mask.masked_fill(hidden, False if mask.dtype == torch.bool else float("-inf"))


class View(NamedTuple):
    """What a layer's attention needs besides the tokens: cosines and sines of the positions, and the mask."""

    cos: Tensor
    sin: Tensor
    mask: Tensor


def views(shape: Shape, cos: Tensor, sin: Tensor, mask: Tensor) -> tuple[View, View]:
    """The view of a layer with positions, and that of one without, of the tokens from position 0 on."""
    near = mask if shape.sliding_window is None else within_window(mask, shape.sliding_window)
    return View(cos, sin, near), View(torch.ones_like(cos), torch.zeros_like(sin), mask)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the half-split rotation that HF Llama uses."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


class RMSNorm(nn.Module):
    """Root-mean-square norm computed in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Returns the input, divided by its root mean square, times the weight."""
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        wide = shape.num_attention_heads * shape.head_dim
        narrow = shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, wide, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, narrow, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, narrow, bias=False)
        self.o_proj = nn.Linear(wide, shape.hidden_size, bias=False)

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], x.shape[1], -1, self.shape.head_dim).transpose(1, 2)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        """Attention over the positions that ``mask`` permits: True, or 0 to be added to the score."""
        query = rotate(self._heads(self.q_proj(x)), cos, sin)
        key = rotate(self._heads(self.k_proj(x)), cos, sin)
        value = self._heads(self.v_proj(x))
        group = self.shape.num_attention_heads // self.shape.num_key_value_heads
        key = key.repeat_interleave(group, dim=1)
        value = value.repeat_interleave(group, dim=1)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self.o_proj(mixed.transpose(1, 2).reshape(x.shape[0], x.shape[1], -1))


class MLP(nn.Module):
    """The SwiGLU feed-forward block."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Applies gate and up projection, then the down projection."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One decoder layer: attention and feed-forward, each after a norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = MLP(shape)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        """Applies both blocks, each with a residual connection."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Trunk(nn.Module):
    """Embedding, layers and final norm: everything under HF's ``model.`` prefix."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.far = tuple(shape.sees_far(layer) for layer in range(shape.num_hidden_layers))

    def forward(self, ids: Tensor, near: View, far: View) -> Tensor:
        """Hidden states of token ids."""
        return self.norm(self.states(ids, near, far, len(self.layers)))

    def states(self, ids: Tensor, near: View, far: View, layers: int) -> Tensor:
        """What the first layers have written, before the final norm."""
        x = self.embed_tokens(ids)
        for number in range(layers):
            x = self.layers[number](x, *(far if self.far[number] else near))
        return x


class Llama(nn.Module):
    """The whole network; logits come from the tied embedding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Trunk(shape)
        self._initialise()

    def _initialise(self) -> None:
        deep = (2 * self.shape.num_hidden_layers) ** -0.5
        for name, weight in self.named_parameters():
            if weight.dim() < 2:
                continue
            # Projections into the residual stream start smaller, so that its variance does not grow with depth.
            scale = deep if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
            nn.init.normal_(weight, std=0.04 * scale)

    def hidden(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """Final hidden states; ``mask`` defaults to plain causal attention."""
        length = ids.shape[1]
        cos, sin = rope_tables(self.shape, length, ids.device)
        if mask is None:
            mask = torch.ones(length, length, dtype=torch.bool, device=ids.device).tril()
        dtype = torch.bfloat16 if torch.is_autocast_enabled(ids.device.type) else torch.float32
        hidden: Tensor = self.model(ids, *views(self.shape, cos.to(dtype), sin.to(dtype), mask))
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of the given hidden states."""
        return F.linear(hidden, self.model.embed_tokens.weight)
