"""The mixtures of experts that the compile gate compiles: those of models, plain and quantized."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from antiphon.services.engine.backends.triton.kernels.experts import mixed_experts
from antiphon.services.engine.backends.triton.kernels.grouped import PackedExperts
from antiphon.services.engine.backends.triton.kernels.products.weights import KernelWeight
from antiphon.services.engine.backends.triton.kernels.routing import route_tokens
from antiphon.services.engine.models.description import Experts
from antiphon.services.engine.quantization.weight import WeightKind
from infra.checks.kernels.shapes import BF16, F16, F32, empty

ROUTED: dict[str, Any] = {"normalise": True, "intermediate_size": 1, "layers": frozenset({0})}
DEEPSEEK_V3 = Experts(
    num_experts=256, num_per_token=8, scoring="sigmoid", correction=True, num_groups=8, num_chosen_groups=4, **ROUTED
)
TOKENS = ((8, "decode"), (256, "batch"), (8192, "prefill"))


def expert_cases() -> Iterator[tuple[str, Callable[[], None]]]:
    """Yields the name of each case and what launches its kernels."""
    for tokens, label in TOKENS:
        yield f"experts, Mixtral 8x7B, {label}", experts(tokens, 8, 2, 4096, 14336, BF16)
        yield f"experts, Qwen3 30B-A3B, {label}", experts(tokens, 128, 8, 2048, 768, F16)
        yield f"experts, gpt-oss-20b, {label}", biased_experts(tokens)
        yield f"experts, Llama 4 Scout, {label}", weighted_experts(tokens)
        yield f"experts, Nemotron 3 Nano, {label}", plain_experts(tokens)
    yield "experts, float32", experts(64, 8, 2, 1024, 2048, F32)
    yield "experts of tokens, Qwen3 30B-A3B", routing(Experts(num_experts=128, num_per_token=8, **ROUTED), BF16)
    yield "experts of tokens, DeepSeek V3", routing(DEEPSEEK_V3, F32)
    for tokens, label in TOKENS:
        yield f"packed experts, gpt-oss-20b in MXFP4, {label}", packed_biased_experts(tokens)
        yield f"packed experts, Qwen3 30B-A3B in fp8, {label}", packed_experts(tokens, "fp8", 128)
        yield f"packed experts, Qwen3 30B-A3B in int8, {label}", packed_experts(tokens, "int8", 0)
        yield f"packed experts, Qwen3 30B-A3B in int4, {label}", packed_experts(tokens, "int4", 64)


def experts(tokens: int, count: int, per_token: int, hidden: int, inner: int, dtype: torch.dtype) -> Callable[[], None]:
    def start() -> None:
        x, chosen = empty(tokens, hidden, dtype=dtype), empty(tokens, per_token, dtype=torch.int64)
        up, down = empty(count, 2 * inner, hidden, dtype=dtype), empty(count, hidden, inner, dtype=dtype)
        mixed_experts(x, empty(tokens, per_token, dtype=dtype), chosen, up, down, "silu", x)

    return start


def plain_experts(tokens: int) -> Callable[[], None]:
    """Returns a case with the experts of Nemotron 3 Nano."""

    def start() -> None:
        x, chosen = empty(tokens, 2688), empty(tokens, 6, dtype=torch.int64)
        up, down = empty(128, 1856, 2688), empty(128, 2688, 1856)
        mixed_experts(x, empty(tokens, 6), chosen, up, down, "relu2", x, gated=False)

    return start


def weighted_experts(tokens: int) -> Callable[[], None]:
    """Returns a case with the experts of Llama 4 Scout."""

    def start() -> None:
        x, chosen = empty(tokens, 5120), empty(tokens, 1, dtype=torch.int64)
        up, down = empty(16, 16_384, 5120), empty(16, 5120, 8192)
        mixed_experts(x, empty(tokens, 1), chosen, up, down, "silu", x, weighted_inputs=True)

    return start


def biased_experts(tokens: int) -> Callable[[], None]:
    """Returns a case with the experts of gpt-oss-20b."""

    def start() -> None:
        x, chosen = empty(tokens, 2880), empty(tokens, 4, dtype=torch.int64)
        up, down, biases = empty(32, 5760, 2880), empty(32, 2880, 2880), (empty(32, 5760), empty(32, 2880))
        mixed_experts(x, empty(tokens, 4), chosen, up, down, "swigluoai", x, biases)

    return start


def routing(one: Experts, dtype: torch.dtype) -> Callable[[], None]:
    """Returns a case that chooses the experts of tokens."""

    def start() -> None:
        correction = empty(one.num_experts, dtype=F32) if one.correction else None
        route_tokens(empty(64, one.num_experts, dtype=dtype), one, correction, None)

    return start


def packed(kind: WeightKind, count: int, out: int, columns: int, group: int, levels: Tensor | None) -> PackedExperts:
    """Returns matrices of experts in the kernel's layout; `group`: columns of a scale, 0 for all."""
    stored = torch.int8 if kind == "int8" else torch.uint8
    values = empty(count, out, columns // 2 if kind == "int4" else columns, dtype=stored)
    scales = empty(count, columns // group, out, dtype=F32) if group else empty(count, out, dtype=F32)
    piece = min(128, group & -group) if group else 128
    like = KernelWeight(
        kind=kind, values=values[0], scales=scales[0], zeros=None, levels=levels, columns=columns, group_size=group,
        piece=piece,
    )  # fmt: skip
    return PackedExperts(values, scales, None, like)


def packed_experts(tokens: int, kind: WeightKind, group: int) -> Callable[[], None]:
    """Returns a case with the experts of Qwen3 30B-A3B, quantized."""

    def start() -> None:
        x, chosen = empty(tokens, 2048), empty(tokens, 8, dtype=torch.int64)
        up, down = packed(kind, 128, 1536, 2048, group, None), packed(kind, 128, 2048, 768, group, None)
        mixed_experts(x, empty(tokens, 8), chosen, up, down, "silu", x)

    return start


def packed_biased_experts(tokens: int) -> Callable[[], None]:
    """Returns a case with the experts of gpt-oss-20b in its own format."""

    def start() -> None:
        x, chosen, levels = empty(tokens, 2880), empty(tokens, 4, dtype=torch.int64), empty(16, dtype=F32)
        up, down = packed("int4", 32, 5760, 2880, 32, levels), packed("int4", 32, 2880, 2880, 32, levels)
        biases = empty(32, 5760), empty(32, 2880)
        mixed_experts(x, empty(tokens, 4), chosen, up, down, "swigluoai", x, biases)

    return start
