"""Times of single kernels in the shapes of Llama 3.1 8B and of published mixtures of experts, each in a graph.

Every kernel reads buffers in turn that do not fit into the device's cache together. Beside each rate is the time, in
milliseconds: TB/s of what must be moved at least, or TFLOP/s of what must be computed.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from antiphon.services.engine.backends.triton.autotune.forms import Products
from antiphon.services.engine.backends.triton.kernels.activation import activated
from antiphon.services.engine.backends.triton.kernels.experts import mixed_experts
from antiphon.services.engine.backends.triton.kernels.grouped import PackedExperts, pack_experts
from antiphon.services.engine.backends.triton.kernels.norm import normed
from antiphon.services.engine.backends.triton.kernels.products.weights import KernelWeight, kernel_weight
from antiphon.services.engine.backends.triton.kernels.routing import route_tokens
from antiphon.services.engine.backends.triton.kernels.sampling import choose_tokens
from antiphon.shared.parameters.sampling import SamplingParams
from bench.gpu.kernels import MIXTURES, PACKED, QUANTIZED, TINY_MIXTURES, Mixture, router
from bench.gpu.parts import Found, Given, compute_parts
from bench.gpu.problems import BF16, E4M3, Attention, LatentAttention, draw, sampling_of
from bench.gpu.timing import computed, graph_ms, moved, num_in_turn, rounded

_CACHE_BYTES_MAX = 40 * 2**30
"""Keys and values of one problem at most."""
_FIRST_WITH_FP8 = (8, 9)
Rows = Iterator[tuple[str, Found]]


def attention(given: Given) -> Rows:
    """Yields decode attention by sequences and context, for caches of 16 and of 8 bits."""
    counts, lengths = ((2,), (70,)) if given.tiny else ((1, 8, 64, 256), (1024, 4096, 32_768, 131_072))
    for cache in (BF16, E4M3):
        for count in counts:
            for length in lengths:
                num_bytes = 2 * count * length * 8 * 128 * cache.itemsize
                if num_bytes > _CACHE_BYTES_MAX:
                    continue
                name = f"decode attention, {count} x {length}, {str(cache).removeprefix('torch.')}"
                make = partial(Attention, [(length - 1, 1)] * count, 32, 8, 128, cache=cache)
                yield name, moved(_problem_ms(make, num_bytes, given), num_bytes)


def _problem_ms(make: Callable[[], Attention], num_bytes: int, given: Given) -> float:
    return graph_ms([make().run for _ in range(num_in_turn(num_bytes, tiny=given.tiny))])


def latents(given: Given) -> Rows:
    """Yields the same for latent attention, and its prefill."""
    counts, length, every = ((2,), 10, (16,)) if given.tiny else ((1, 8, 64, 256), 4096, (16, 128))
    for heads in every:
        for count in counts:
            num_bytes = count * length * 576 * 2
            ms = _problem_ms(partial(LatentAttention, [(length - 1, 1)] * count, heads), num_bytes, given)
            yield f"decode latent attention, {heads} heads, {count} x {length}", moved(ms, num_bytes)
        ms = graph_ms([LatentAttention([(0, length)], heads).run])
        yield f"prefill latent attention, {heads} heads, {length}", computed(ms, length**2 * heads * 1088)


def prefill(given: Given) -> Rows:
    """Yields prefill attention, beside cuDNN's of the same tokens, which reads keys and values as plain tensors."""
    for length in (10,) if given.tiny else (512, 2048, 8192, 32_768):
        operations = 2 * length**2 * 32 * 128
        yield f"prefill attention, {length}", computed(graph_ms([Attention([(0, length)], 32, 8, 128).run]), operations)
        yield f"prefill attention, {length}, cuDNN", _cudnn(given, length, operations)


def _cudnn(given: Given, length: int, operations: int) -> Found:
    queries, keys, values = (draw(1, heads, length, 128) for heads in (32, 8, 8))
    attend = partial(F.scaled_dot_product_attention, queries, keys, values, is_causal=True, enable_gqa=True)
    backend = SDPBackend.CUDNN_ATTENTION if given.on_device else SDPBackend.MATH
    try:
        with sdpa_kernel(backend):
            return computed(graph_ms([attend]), operations)
    except RuntimeError as error:  # a library without this backend
        return {"not there": str(error)[:200]}


def sampler(given: Given) -> Rows:
    """Yields sampling from logits that are peaked as those of a trained model, and from flat ones."""
    vocab = 300 if given.tiny else 128_256
    kinds = {
        "greedy": SamplingParams(temperature=0.0),
        "plain": SamplingParams(),
        "top-p": SamplingParams(top_p=0.9),
        "top-k and top-p": SamplingParams(top_k=50, top_p=0.9),
    }
    for rows in (2,) if given.tiny else (1, 64, 256):
        for shape, scale in (("peaked", 3.0), ("flat", 0.3)):
            logits = [draw(rows, vocab, scale=scale) for _ in range(num_in_turn(2 * rows * vocab, tiny=given.tiny))]
            for name, params in kinds.items():
                placed = sampling_of(rows, vocab, params)
                draws = name != "greedy"
                ms = graph_ms([partial(choose_tokens, each, *placed, any_draws=draws) for each in logits])
                yield f"sampling, {name}, {rows} rows, {shape}", {"ms": rounded(ms)}


def experts(given: Given) -> Rows:
    """Yields mixtures of experts with their choice, plain and packed; bytes are those of the experts that are chosen.

    With many tokens operations count, so both rates are there.
    """
    for name, m in (TINY_MIXTURES if given.tiny else MIXTURES).items():
        for kind in ("", *PACKED):
            stored, num_bytes = _matrices(m, kind)
            for tokens in (2,) if given.tiny else (1, 64, 256, 4096):
                x = draw(tokens, m.hidden)
                # Tokens that choose other experts each time, which are then not in the cache.
                every = [draw(tokens, m.count, dtype=torch.float32) for _ in range(1 if given.tiny else 8)]
                chosen = [route_tokens(each, router(m), None, None)[1].unique().numel() for each in every]
                ms = graph_ms([partial(_mix, m, x, each, *stored) for each in every])
                found = moved(ms, num_bytes * sum(chosen) // len(every) // m.count)
                found |= computed(ms, 6 * tokens * m.per_token * m.hidden * m.inner)
                yield f"experts, {name}, {kind or 'bfloat16'}, {tokens} rows", found
            del stored


Matrices = Tensor | PackedExperts


def _matrices(m: Mixture, kind: str) -> tuple[tuple[Matrices, Matrices], int]:
    """Returns the matrices of experts, all of the same values, and their bytes."""
    up, down = draw(2 * m.inner, m.hidden, scale=0.02), draw(m.hidden, m.inner, scale=0.02)
    if not kind:
        stored = up.expand(m.count, -1, -1).contiguous(), down.expand(m.count, -1, -1).contiguous()
        return stored, stored[0].nbytes + stored[1].nbytes
    packed = tuple(pack_experts([PACKED[kind](one)] * m.count, BF16) for one in (up, down))
    assert packed[0] is not None, f"the kernel does not read {kind}"
    assert packed[1] is not None, f"the kernel does not read {kind}"
    return (packed[0], packed[1]), sum(each.values.nbytes + each.scales.nbytes for each in packed if each is not None)


def _mix(m: Mixture, x: Tensor, logits: Tensor, up: Matrices, down: Matrices) -> None:
    shares, chosen = route_tokens(logits, router(m), None, None)
    mixed_experts(x, shares.to(x.dtype), chosen, up, down, m.activation)


def products(given: Given) -> Rows:
    """Yields products of few to many rows, in every form of each kind of weights; bytes are those of the weights."""
    width, columns = (48, 128) if given.tiny else (4096, 14336)
    plain = [draw(width, columns, scale=0.02) for _ in range(num_in_turn(2 * width * columns, tiny=given.tiny))]
    yield from _product_rows("bfloat16", plain, given)
    for name, quantize in QUANTIZED.items():
        one = kernel_weight(quantize(plain[0]), BF16)
        count = num_in_turn(one.values.nbytes, tiny=given.tiny)
        others = (kernel_weight(quantize(plain[0]), BF16) for _ in range(count - 1))
        yield from _product_rows(name, [one, *others], given)


def _product_rows(name: str, weights: list[Tensor] | list[KernelWeight], given: Given) -> Rows:
    first, products = weights[0], Products()
    plain = isinstance(first, Tensor)
    choice = products.add_plain(first) if plain else products.add_quantized(first, draw(1))
    num_bytes, columns = (first.nbytes, first.shape[1]) if plain else (first.values.nbytes, first.columns)
    able = given.on_device and torch.cuda.get_device_capability() >= _FIRST_WITH_FP8
    for rows in (2,) if given.tiny else (1, 8, 16, 32, 64, 128, 256):
        x = draw(rows, columns)
        for form in choice.forms.values():
            if (form.rows_max is None or rows <= form.rows_max) and (able or not form.in_fp8):
                ms = graph_ms([partial(form.compute, x, weight, None, None) for weight in weights])
                yield f"{name}, {form.name}, {rows} rows", moved(ms, num_bytes)


def small(given: Given) -> Rows:
    """Yields the kernels between products."""
    hidden, inner = (128, 96) if given.tiny else (4096, 14336)
    for rows in (2,) if given.tiny else (8, 256, 8192):
        x, weight, wide = draw(rows, hidden), draw(hidden), draw(rows, 2 * inner)
        yield f"norm, {rows} rows", moved(graph_ms([partial(normed, x, weight, None, 1e-5)]), 2 * x.nbytes)
        ms = graph_ms([partial(activated, wide, "silu", gated=True)])
        yield f"silu, {rows} rows", moved(ms, wide.nbytes + wide.nbytes // 2)


def timed(rows: Callable[[Given], Rows], given: Given) -> Found:
    """Returns the rows of a table by their names."""
    found: Found = {}
    for name, row in rows(given):
        found[name] = row
        if given.on_device:
            # What a problem has taken must be free for the next one.
            torch.cuda.empty_cache()
    return found


PARTS = {
    "times of decode attention": partial(timed, attention),
    "times of prefill attention": partial(timed, prefill),
    "times of sampling": partial(timed, sampler),
    "times of products": partial(timed, products),
    "times of experts": partial(timed, experts),
    "times of latent attention": partial(timed, latents),
    "times of small kernels": partial(timed, small),
}

if __name__ == "__main__":
    with torch.inference_mode():
        compute_parts(PARTS)
