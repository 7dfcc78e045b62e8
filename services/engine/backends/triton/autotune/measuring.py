"""Measures the forms of a product: how long each takes, and whether its result is that of a reference in float32."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from antiphon.services.engine.backends.triton.autotune.expert_forms import (
    ExpertWeights,
    reference_experts,
    routed_like,
)
from antiphon.services.engine.backends.triton.autotune.forms import Form
from antiphon.services.engine.backends.triton.graphs import CudaCapture
from antiphon.services.engine.backends.triton.kernels.products.rows import order_rows, round_rows
from antiphon.services.engine.backends.triton.kernels.products.weights import dequantized

ERRORS_MAX = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""Largest relative error by the type of rows: several times the error of rounding operands and result to the type."""
_READ_BYTES = 2**28
"""Weights that a measurement reads in turn, so that it does not find them in a GPU's cache (50 MB on an H100)."""
_WEIGHTS_MAX, _WEIGHTS_MAX_MANY, _MANY_ROWS = 32, 2, 512
"""Weights in turn, and those with many rows, which take so long that the cache does not matter."""
_REPEATS = 5

Timer = Callable[[Sequence[Callable[[], object]]], float]
"""Returns the milliseconds that a call takes, of several that follow each other."""


class WrongResult(Exception):
    """A form does not compute the product. The message says by how much it is wrong."""


def timer_of(device: torch.device) -> Timer:
    """Returns what measures on a device."""
    return _graph_ms if device.type == "cuda" else _host_ms


def _graph_ms(calls: Sequence[Callable[[], object]]) -> float:
    """Measures in a CUDA graph, as most steps run, without the time in which the host launches."""

    def run() -> None:
        for call in calls:
            call()

    run()
    replay = CudaCapture()(run)
    replay()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    found: list[float] = []
    for _ in range(_REPEATS):
        begin.record()
        replay()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end))
    return statistics.median(found) / len(calls)


def _host_ms(calls: Sequence[Callable[[], object]]) -> float:
    found: list[float] = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        for call in calls:
            call()
        found.append(time.perf_counter() - started)
    return 1000 * statistics.median(found) / len(calls)


def rows_like(weight: Any, num_rows: int, like: Tensor) -> Any:
    """Returns rows of random numbers for a product, of the type and on the device of `like`."""
    if isinstance(weight, ExpertWeights):
        return routed_like(weight, num_rows, like)
    columns = weight.shape[1] if isinstance(weight, Tensor) else weight.columns
    if not isinstance(weight, Tensor) and weight.order is not None:
        columns = int(weight.order.max()) + 1
    generator = torch.Generator(like.device).manual_seed(columns)
    return torch.randn((num_rows, columns), generator=generator, device=like.device, dtype=torch.float32).to(like.dtype)


def reference(x: Any, weight: Any, *, in_fp8: bool = False) -> Tensor:
    """Returns x Wᵀ in float32, from the numbers that a quantized weight, and rows in 8 bits, stand for.

    `in_fp8`: rows are rounded to float8_e4m3.
    """
    if isinstance(weight, ExpertWeights):
        return reference_experts(x, weight)
    if isinstance(weight, Tensor):
        return F.linear(x.float(), weight.float())
    x = x if weight.order is None else order_rows(x, weight.order)
    if in_fp8 or weight.kind == "int8_dynamic":
        rounded, scales = round_rows(x, torch.float8_e4m3fn if in_fp8 else torch.int8)
        return F.linear(rounded.float() * scales[:, None], dequantized(weight, torch.float32))
    return F.linear(x.float(), dequantized(weight, torch.float32))


def check(form: Form, x: Any, weight: Any, expected: Tensor) -> None:
    """Raises `WrongResult` if the form does not compute `expected`."""
    found = form.compute(x, weight, None, None).float()
    error = float((found - expected).norm() / expected.norm().clamp_min(1e-30))
    # Also true of an error that is not a number.
    if not error <= ERRORS_MAX[x.dtype]:
        raise WrongResult(f"its relative error is {error:.2g}")


def milliseconds(form: Form, x: Any, weights: Sequence[Any], timer: Timer) -> float:
    """Returns the time of a product with one of the weights, which are used in turn."""
    most = _WEIGHTS_MAX if x.shape[0] < _MANY_ROWS else _WEIGHTS_MAX_MANY
    num = max(1, min(len(weights), most, -(-_READ_BYTES // _nbytes(weights[0]))))
    return timer([lambda weight=weight: form.compute(x, weight, None, None) for weight in weights[:num]])


def _nbytes(weight: Any) -> int:
    """Returns the bytes of the matrices, about those that a product of many rows reads."""
    if isinstance(weight, ExpertWeights):
        return _nbytes(weight.gate_up) + _nbytes(weight.down)
    return weight.nbytes if isinstance(weight, Tensor) else weight.values.nbytes
