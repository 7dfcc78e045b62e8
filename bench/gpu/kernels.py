"""Compares the kernels in bfloat16 on the device with references in float32, in the shapes of published models.

An error is ‖ours - theirs‖ / ‖theirs‖. With bfloat16 operands it is between 0.001 and 0.01. Each comparison has its own
random numbers, twice, and the larger error counts.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from antiphon.services.engine.backends.triton.autotune.forms import Choice, Form, Products
from antiphon.services.engine.backends.triton.autotune.measuring import reference
from antiphon.services.engine.backends.triton.kernels.activation import activated
from antiphon.services.engine.backends.triton.kernels.blocks import gather_blocks, scatter_blocks
from antiphon.services.engine.backends.triton.kernels.experts import mixed_experts
from antiphon.services.engine.backends.triton.kernels.grouped import PackedExperts, pack_experts
from antiphon.services.engine.backends.triton.kernels.lora import LoraMatrix, put_tiles
from antiphon.services.engine.backends.triton.kernels.norm import normed
from antiphon.services.engine.backends.triton.kernels.products.skinny import skinny_linear
from antiphon.services.engine.backends.triton.kernels.products.weights import KernelWeight, kernel_weight
from antiphon.services.engine.backends.triton.kernels.routing import route_tokens
from antiphon.services.engine.backends.triton.kernels.sampling import choose_tokens
from antiphon.services.engine.kernels.activation import ACTIVATIONS, gated, gated_by, xielu, xielu_numbers
from antiphon.services.engine.kernels.experts import mixed_experts as reference_experts
from antiphon.services.engine.kernels.experts import route
from antiphon.services.engine.kernels.rms_norm import rms_norm
from antiphon.services.engine.models.description import Experts
from antiphon.services.engine.quantization.rounding import quantize_fp8, quantize_int4, quantize_int8, quantize_nf4
from antiphon.services.engine.quantization.weight import QuantizedWeight
from antiphon.shared.parameters.sampling import SamplingParams
from bench.gpu.parts import DEVICE, Found, Given, compute_parts
from bench.gpu.problems import BF16, E4M3, Attention, ExpandedLatents, LatentAttention, draw, sampling_of
from bench.gpu.timing import rounded

QUANTIZED: dict[str, Callable[[Tensor], QuantizedWeight]] = {
    "int8": quantize_int8,
    "int8_dynamic": lambda weight: quantize_int8(weight, "int8_dynamic"),
    "int4": quantize_int4,
    "int4 with zero points": lambda weight: quantize_int4(weight, 128, zero_points=True),
    "nf4": quantize_nf4,
    "fp8": lambda weight: replace(quantize_fp8(weight), rows_in_fp8=True),
}
PACKED: dict[str, Callable[[Tensor], QuantizedWeight]] = {
    "int8": quantize_int8,
    "int4 in groups of 32": lambda weight: quantize_int4(weight, 32),
    "fp8": quantize_fp8,
}
ERROR_MAX = 0.012
_SEEDS = 2
_FIRST_WITH_FP8 = (8, 9)
Errors = Iterator[tuple[str, float]]


@dataclass(frozen=True, slots=True)
class Mixture:
    """The experts of a published model. `biases`: as those of gpt-oss, whose activation is swigluoai."""

    count: int
    per_token: int
    hidden: int
    inner: int
    biases: bool = False

    @property
    def activation(self) -> str:
        """The activation of the experts."""
        return "swigluoai" if self.biases else "silu"


MIXTURES = {
    "Qwen3 30B-A3B": Mixture(128, 8, 2048, 768),
    "Mixtral 8x7B": Mixture(8, 2, 4096, 14336),
    "gpt-oss-20b": Mixture(32, 4, 2880, 2880, biases=True),
}
TINY_MIXTURES = {"tiny": Mixture(4, 2, 64, 32), "tiny with biases": Mixture(4, 2, 64, 64, biases=True)}


def error(ours: Tensor, theirs: Tensor) -> float:
    """Returns the relative error; NaN counts as one."""
    ours, theirs = ours.float(), theirs.float()
    return float((ours - theirs).norm() / theirs.norm())


def attention_errors(given: Given) -> Errors:
    """Yields the name and the error of each comparison."""
    lengths_of = {
        "decode": [(n, 1) for n in (1, 15, 255, 256, 1000, 4097, 40_000)],
        # Each prompt has a computed prefix, so that the reference reads all keys and values from the cache too.
        "prefill": [(16, 300), (500, 129), (100, 1), (1000, 64)],
    }
    if given.tiny:
        lengths_of = {"decode": [(1, 1), (70, 1)], "prefill": [(16, 20), (5, 9)]}
    for name, lengths in lengths_of.items():
        yield f"{name}, 32 heads on 8", _attention_error(Attention(lengths, 32, 8, 128))
        eight = Attention(lengths, 32, 8, 128, cache=E4M3)
        yield f"{name}, e4m3 cache", _attention_error(eight)
        yield f"{name}, window", _attention_error(Attention(lengths, 16, 8, 128, window=200))
        yield f"{name}, latents, 16 heads", _attention_error(LatentAttention(lengths, 16))
        if given.tiny:
            continue
        yield f"{name}, soft cap, 256", _attention_error(Attention(lengths, 8, 4, 256, softcap=30.0))
        yield f"{name}, groups of 7, 64", _attention_error(Attention(lengths, 14, 2, 64))
        yield f"{name}, groups of 8, 512", _attention_error(Attention(lengths, 8, 1, 512))
        for heads in (20, 128):
            yield f"{name}, latents, {heads} heads", _attention_error(LatentAttention(lengths, heads))
        yield f"{name}, latents, e4m3 cache", _attention_error(LatentAttention(lengths, 16, E4M3))
    for length in () if given.tiny else (32_768, 131_072):
        for cache in (BF16, E4M3):
            name = f"{length} keys, {str(cache).removeprefix('torch.')}"
            yield f"decode, {name}", _attention_error(Attention([(length - 1, 1), (3, 1)], 32, 8, 128, cache=cache))
            yield f"prefill behind {name}", _attention_error(Attention([(length, 130)], 32, 8, 128, cache=cache))
    if not given.tiny:
        yield "chunks, expanded latents", _attention_error(ExpandedLatents([(300, 700), (64, 400)], 16))
        yield "chunks, expanded latents, in pieces", _attention_error(ExpandedLatents([(30_000, 300)], 16))
    images = lengths_of["prefill"]
    yield "images", _attention_error(Attention([*images, (30, 5)], 32, 16, 128, images=True))
    yield "images, window", _attention_error(Attention(images, 16, 8, 256, window=200, images=True))
    guesses = [(30, 3)] if given.tiny else [(300, 9), (4000, 5)]
    yield "guesses, latents", _attention_error(LatentAttention(guesses, 20))
    yield "guesses", _attention_error(Attention(guesses, 32, 8, 128))


def _attention_error(attention: Attention) -> float:
    return error(attention.run(), attention.expected())


def product_errors(given: Given) -> Errors:
    """Yields the same for products: every form of each kind of weights."""
    width, columns, numbers = (48, 128, (1, 20)) if given.tiny else (1008, 4096, (1, 5, 16, 70, 300))
    like = draw(1)
    able = given.on_device and torch.cuda.get_device_capability() >= _FIRST_WITH_FP8
    plain, products = draw(width, columns, scale=0.02), Products()
    weights: dict[str, tuple[Tensor | KernelWeight, Choice]] = {"bfloat16": (plain, products.add_plain(plain))}
    for name, quantize in QUANTIZED.items():
        weight = kernel_weight(quantize(plain), BF16)
        weights[name] = weight, products.add_quantized(weight, like)
    for name, (weight, choice) in weights.items():
        for rows in numbers:
            for form in choice.forms.values():
                if (form.rows_max is None or rows <= form.rows_max) and (able or not form.in_fp8):
                    yield f"{name}, {form.name}, {rows} rows", _form_error(form, draw(rows, columns), weight)
    for rows in (1, 16):
        yield f"gate and up, {rows} rows", _gated_error(rows, columns, width)
    yield "adapters", _adapter_error(columns, width)


def _form_error(form: Form, x: Tensor, weight: object) -> float:
    return error(form.compute(x, weight, None, None), reference(x, weight, in_fp8=form.in_fp8))


def _gated_error(rows: int, columns: int, width: int) -> float:
    x, weight, residual = draw(rows, columns), draw(2 * width, columns, scale=0.02), draw(rows, width)
    ours = skinny_linear(x, weight, activation="silu", residual=residual)
    return error(ours, residual.float() + gated(ACTIVATIONS["silu"], F.linear(x.float(), weight.float())))


def _adapter_error(columns: int, width: int) -> float:
    """Rows of two adapters and of none, for a matrix that is stacked from three."""
    slots, widths, rank = [0, 1, -1, 1, 0] * 5, (width, width // 2, width // 2), 16
    matrix = LoraMatrix(2, widths, columns, rank, draw(1))
    matrix.a.copy_(draw(*matrix.a.shape, scale=columns**-0.5))
    matrix.b.copy_(draw(*matrix.b.shape))
    y, x = draw(len(slots), sum(widths)), draw(len(slots), columns)
    expected = y.float()
    for row, slot in enumerate(slots):
        if slot >= 0:
            inner = (matrix.a[slot].float() @ x[row].float()).to(BF16).float().view(len(widths), -1)
            parts = matrix.b[slot].float().split(list(widths))
            expected[row] += torch.cat([part @ one for part, one in zip(parts, inner, strict=True)])
    tiles = put_tiles(np.array(slots), lambda values: torch.from_numpy(values.astype(np.int32)).to(DEVICE))
    return error(matrix.add(y, x, tiles), expected)


def expert_errors(given: Given) -> Errors:
    """Yields the same for mixtures of experts, plain and packed."""
    for name, mixture in (TINY_MIXTURES if given.tiny else MIXTURES).items():
        for tokens in (3, 20) if given.tiny else (3, 300, 4000):
            yield f"{name}, {tokens} tokens", _experts_error(mixture, tokens, "")
            for kind in PACKED:
                yield f"{name}, {kind}, {tokens} tokens", _experts_error(mixture, tokens, kind)


def _experts_error(m: Mixture, tokens: int, kind: str) -> float:
    x = draw(tokens, m.hidden)
    up, down = draw(m.count, 2 * m.inner, m.hidden, scale=m.hidden**-0.5), draw(m.count, m.hidden, m.inner, scale=0.05)
    biases = (draw(m.count, 2 * m.inner), draw(m.count, m.hidden)) if m.biases else (None, None)
    logits = draw(tokens, m.count, dtype=torch.float32)
    shares, chosen = route_tokens(logits, router(m), None, None)
    theirs_shares, theirs_chosen = route(logits, m.per_token, normalise=True)
    (ours_up, exact_up), (ours_down, exact_down) = (_stored(matrices, kind) for matrices in (up, down))
    ours = mixed_experts(x, shares.to(BF16), chosen, ours_up, ours_down, m.activation, None, biases)
    inner, outer = (
        [partial(F.linear, weight=one, bias=None if bias is None else bias[at].float()) for at, one in enumerate(each)]
        for each, bias in zip((exact_up, exact_down), biases, strict=True)
    )
    theirs = reference_experts(x.float(), theirs_shares, theirs_chosen, inner, outer, gated_by(m.activation))
    return error(ours, theirs)


def _stored(matrices: Tensor, kind: str) -> tuple[Tensor | PackedExperts, Tensor]:
    """Returns matrices of experts as the kernel reads them, and the numbers that they stand for."""
    if not kind:
        return matrices, matrices.float()
    quantized = [PACKED[kind](one) for one in matrices]
    packed = pack_experts(quantized, BF16)
    assert packed is not None, f"the kernel does not read {kind}"
    return packed, torch.stack([one.dequantized() for one in quantized])


def router(m: Mixture) -> Experts:
    """Returns how a mixture chooses its experts."""
    return Experts(
        num_experts=m.count, num_per_token=m.per_token, normalise=True, intermediate_size=m.inner, layers=frozenset()
    )


def other_errors(given: Given) -> Errors:
    """Yields the same for norms and activations; copies of blocks and the most likely tokens must be equal."""
    rows, hidden, inner, vocab = (3, 128, 96, 300) if given.tiny else (65, 4096, 14336, 128_256)
    x, weight, residual = draw(rows, hidden), draw(hidden), draw(rows, hidden)
    expected = residual.float() + rms_norm(x.float(), weight.float(), 1e-5)
    yield "norm", error(normed(x, weight, None, 1e-5, residual), expected)
    wide = draw(rows, 2 * inner)
    for kind in ("silu", "gelu"):
        yield kind, error(activated(wide, kind, gated=True), gated(ACTIVATIONS[kind], wide.float()))
    yield "relu2", error(activated(wide, "relu2", gated=False), ACTIVATIONS["relu2"](wide.float()))
    numbers = xielu_numbers(torch.tensor([0.2, -0.8, 0.5, -1e-6], device=DEVICE))
    yield "xielu", error(activated(wide, "xielu", gated=False, numbers=numbers), xielu(numbers, wide.float()))
    for name, params in {"greedy": {"temperature": 0.0}, "top-k": {"top_k": 1}, "top-p": {"top_p": 1e-6}}.items():
        logits = draw(rows, vocab, scale=3.0)
        tokens, _ = choose_tokens(logits, *sampling_of(rows, vocab, SamplingParams(**params)))
        yield f"tokens, {name}", float((logits.gather(1, tokens[:, None])[:, 0] != logits.amax(1)).any())
    cache = torch.randint(0, 2**60, (2, 50, 64) if given.tiny else (64, 50, 4096), device=DEVICE)
    packed = torch.zeros(7, cache.shape[0], cache.shape[2], device=DEVICE, dtype=torch.int64)
    blocks = torch.tensor([3, 49, 0, 7, 8, 11, 20], dtype=torch.int32, device=DEVICE)
    gather_blocks(cache, blocks, packed)
    copy = torch.zeros_like(cache)
    scatter_blocks(packed, blocks, copy)
    yield "blocks", 0.0 if torch.equal(copy[:, blocks.long()], cache[:, blocks.long()]) else 1.0


def compared(errors: Callable[[Given], Errors], given: Given) -> Found:
    """Returns the larger error of each comparison, and the names of those that are too large."""
    found: dict[str, float] = {}
    for seed in range(1 if given.tiny else _SEEDS):
        torch.manual_seed(seed)
        for name, value in errors(given):
            # A number that is not one is the larger one.
            found[name] = found[name] if name in found and not value > found[name] and value == value else value
    wrong = [name for name, value in found.items() if not value <= ERROR_MAX]
    return {"errors": {name: rounded(value) for name, value in found.items()}, "wrong": wrong}


PARTS = {
    "errors of attention": partial(compared, attention_errors),
    "errors of products": partial(compared, product_errors),
    "errors of experts": partial(compared, expert_errors),
    "errors of other kernels": partial(compared, other_errors),
}

if __name__ == "__main__":
    with torch.inference_mode():
        compute_parts(PARTS)
