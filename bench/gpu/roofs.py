"""What the device can do at best, and the shortest times of an engine's steps that follow from that.

    read, copy      bytes moved in a second, TB/s
    gemm, fp8       operations of products of M rows with matrices [14336, 4096] in a second, TFLOP/s, by M
    gap             time from one empty kernel of a graph to the next, microseconds

The floor of a step is the sum of the floors of its products with the weights and of its attention. The floor of either
is the time to move its bytes once, or to compute its operations, whichever is longer.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from antiphon.services.engine.models.description import DecoderDescription
from bench.gpu.parts import DEVICE, Found, Given, compute_parts
from bench.gpu.timing import graph_ms, rounded

ROWS = (64, 256, 8192)
_WIDTH, _COLUMNS = 14336, 4096
_EMPTY_KERNELS = 300
_FIRST_WITH_FP8 = (8, 9)


def roofs(given: Given) -> Found:
    """Measures the device."""
    num_bytes, width, columns = (2**20, 64, 32) if given.tiny else (4 * 2**30, _WIDTH, _COLUMNS)
    found = _moved_bytes(num_bytes)
    one = torch.zeros(1, device=DEVICE)
    # A fill of one number does no work that counts.
    gap_ms = graph_ms([lambda: one.fill_(1.0)], least=_EMPTY_KERNELS)
    weights = [torch.randn(width, columns, device=DEVICE).to(torch.bfloat16) for _ in range(4)]
    rows = (3, 5, 7) if given.tiny else ROWS
    found |= {
        "gemm_tflop_s": {str(m): _rate(m, weights, _in_bfloat16) for m in rows},
        "gap_us": rounded(1e3 * gap_ms),
    }
    if given.on_device and torch.cuda.get_device_capability() >= _FIRST_WITH_FP8:
        found["fp8_tflop_s"] = {str(m): _rate(m, weights, _in_fp8) for m in rows}
    return found


def _moved_bytes(num_bytes: int) -> Found:
    source = torch.ones(num_bytes // 4, dtype=torch.float32, device=DEVICE)
    target = torch.empty_like(source)
    read = min(graph_ms([source.sum]), graph_ms([source.amax]))
    copied = graph_ms([partial(target.copy_, source)])
    return {
        "read_tb_s": rounded(num_bytes / read / 1e9),
        "copy_tb_s": rounded(2 * num_bytes / copied / 1e9),
    }


def _rate(rows: int, weights: list[Tensor], product: Callable[[Tensor, Tensor], Callable[[], Tensor]]) -> float:
    width, columns = weights[0].shape
    x = torch.randn(rows, columns, device=DEVICE).to(torch.bfloat16)
    ms = graph_ms([product(x, weight) for weight in weights])
    return rounded(2 * rows * width * columns / ms / 1e9)


def _in_bfloat16(x: Tensor, weight: Tensor) -> Callable[[], Tensor]:
    return partial(F.linear, x, weight)


def _in_fp8(x: Tensor, weight: Tensor) -> Callable[[], Tensor]:
    """One scale for each row of both, as the engine has them."""
    scales = torch.ones(len(x), 1, device=DEVICE), torch.ones(1, len(weight), device=DEVICE)
    x, weight = x.to(torch.float8_e4m3fn), weight.to(torch.float8_e4m3fn)
    row_wise = F.ScalingType.RowWise
    return lambda: F.scaled_mm(x, weight.t(), scales[0], row_wise, scales[1], row_wise, output_dtype=torch.bfloat16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What floors are computed with: bytes moved, and operations of products and of attention, in a second."""

    tb_s: float
    products_tflop_s: float
    attention_tflop_s: float

    @classmethod
    def of(cls, roofs: Mapping[str, Any], *, fp8: bool = False) -> "Rates":
        """Returns the rates of measured roofs. `fp8`: whether products multiply numbers of 8 bits."""
        gemm = max(roofs["gemm_tflop_s"].values())
        products = max([gemm, *(roofs.get("fp8_tflop_s", {}).values() if fp8 else ())])
        return cls(tb_s=max(roofs["read_tb_s"], roofs["copy_tb_s"]), products_tflop_s=products, attention_tflop_s=gemm)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a model's steps read and multiply. `weights_bytes`: of the matrices that a step multiplies with, as stored.

    `kv_itemsize`: bytes of a number in the KV cache.
    """

    description: DecoderDescription
    weights_bytes: int
    kv_itemsize: int = 2

    def decode_ms(self, batch: int, context: int, rates: Rates) -> float:
        """Returns the floor of a step in which each of `batch` sequences of `context` tokens gets a token."""
        d = self.description
        operations = 2 * parameters(d) * batch
        products = max(self.weights_bytes / rates.tb_s, operations / rates.products_tflop_s)
        read = 2 * d.num_layers * d.kv_size * self.kv_itemsize * batch * context
        scores = 4 * d.num_layers * d.q_size * batch * context
        return (products + max(read / rates.tb_s, scores / rates.attention_tflop_s)) / 1e9

    def prefill_ms(self, length: int, rates: Rates) -> float:
        """Returns the floor of computing a prompt: its products without the head, and causal attention."""
        d = self.description
        body = parameters(d) - d.vocab_size * d.hidden_size
        products = max(2 * body * length / rates.products_tflop_s, self.weights_bytes / rates.tb_s)
        return (products + 2 * length**2 * d.q_size * d.num_layers / rates.attention_tflop_s) / 1e9


def parameters(d: DecoderDescription) -> int:
    """Returns the number of weights that a step multiplies with: all matrices except the embedding."""
    layer = d.hidden_size * (2 * d.q_size + 2 * d.kv_size + 3 * d.intermediate_size)
    return d.num_layers * layer + d.vocab_size * d.hidden_size


PARTS = {"roofs": roofs}

if __name__ == "__main__":
    with torch.inference_mode():
        compute_parts(PARTS)
