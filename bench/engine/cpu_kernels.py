"""Times single matrix products of the CPU library, for each kind of weights (bfloat16 and quantized), without a model.

    python bench/engine/cpu_kernels.py [--rows 1 8 32 256] [--shapes 4864x896 896x4864 151936x896] [--kinds …]
    [--variant amx]

Each kind of weights has so many copies of a matrix that they do not fit into the caches. The calls cycle through the
copies, the kinds alternate, and the fastest call of each kind counts. The machine's own limits are measured in between.

    GB/s      bytes of packed weights, including scales / time
    of bf16   the GB/s as a share of those of the bfloat16 kernel with one row, a bandwidth that is known to be reached
    GFLOP/s   2 x out x in x rows / time
"""

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from antiphon.services.engine.backends.cpu.compile import Variant, make_library, usable_variants  # noqa: E402
from antiphon.services.engine.backends.cpu.library import cache_directory, find_library  # noqa: E402
from antiphon.services.engine.backends.cpu.native import (  # noqa: E402
    Library,
    NativeModel,
    Spec,
    native_weight,
)
from antiphon.services.engine.quantization.rounding import quantize_int4, quantize_int8, quantize_nf4  # noqa: E402
from antiphon.services.engine.quantization.weight import QuantizedWeight  # noqa: E402
from bench.limits_of_machine.probe import gemm_rate, read_rate  # noqa: E402  (after the path)

PANEL = 32
COPIES_MAX = 24
TRIES = 3
FEWEST_CALLS = 12
BUDGET_S = 1.0
"""Time in seconds for the calls of one kind with one shape and number of rows."""


@dataclass(frozen=True, slots=True)
class Copies:
    """Copies of a matrix, stored in a model that has one of them in each layer and nothing else."""

    kind: str
    model: NativeModel
    count: int
    bytes: int
    """Size of one packed copy in bytes."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Rates of the CPU library's matrices.")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 32, 256])
    parser.add_argument("--shapes", nargs="*", default=["4864x896", "896x4864", "151936x896"])
    parser.add_argument("--kinds", nargs="*", default=list(KINDS))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--megabytes", type=int, default=192, help="of bfloat16 copies of a matrix")
    parser.add_argument("--variant", default="", help="of the library; default: the best for this processor")
    options = parser.parse_args()
    variant = next(v for v in usable_variants() if options.variant in ("", v.name))
    library = load(variant)
    print(f"{variant.name}, {options.threads} threads, out x in, ms and rates of the best call")
    for shape in options.shapes:
        out, width = map(int, shape.split("x"))
        print(f"\n{shape:<14}{'rows':>5}{'ms':>10}{'GB/s':>8}{'of bf16':>9}{'GFLOP/s':>9}", flush=True)
        measure_shape(library, out, width, options)
        read, gemm = read_rate(options.megabytes * 2**20, TRIES) / 1e9, gemm_rate(TRIES) / 1e9
        print(f"{'probes':<29}{read:>8.1f}{'':>9}{gemm:>9.0f}", flush=True)


def measure_shape(library: Library, out: int, width: int, options: argparse.Namespace) -> None:
    """Measures one shape with all kinds and numbers of rows, and prints the rows of the table."""
    count = max(1, min(COPIES_MAX, options.megabytes * 2**20 // (out * width * 2)))
    kinds = [make_copies(library, kind, out, width, count, options.threads) for kind in options.kinds]
    reached = 0.0
    for rows in options.rows:
        x = pad_rows(torch.randn(rows, width))
        y = torch.empty(rows, -(-out // PANEL) * PANEL)
        best = best_calls(kinds, x, y)
        for copies in kinds:
            seconds = best[copies.kind]
            rate = copies.bytes / seconds
            reached = rate if (copies.kind, rows) == ("bf16", 1) else reached
            share = f"{rate / reached:>9.0%}" if reached else f"{'':>9}"
            flops = 2 * out * width * rows / seconds / 1e9
            print(
                f"  {copies.kind:<12}{rows:>5}{seconds * 1e3:>10.3f}{rate / 1e9:>8.1f}{share}{flops:>9.0f}", flush=True
            )
    for copies in kinds:
        copies.model.free()


def best_calls(kinds: list[Copies], x: Tensor, y: Tensor) -> dict[str, float]:
    """Returns the seconds of each kind's fastest call. The kinds alternate after one pass through all their copies."""
    best = {copies.kind: float("inf") for copies in kinds}
    started, calls = time.perf_counter(), 0
    while calls < FEWEST_CALLS or time.perf_counter() - started < BUDGET_S * len(kinds):
        for copies in kinds:
            for layer in range(copies.count):
                best[copies.kind] = min(best[copies.kind], call(copies.model, layer, x, y))
            calls += copies.count
        if time.perf_counter() - started > 3 * BUDGET_S * len(kinds):
            break
    return best


def call(model: NativeModel, layer: int, x: Tensor, y: Tensor) -> float:
    """Runs one product and returns its seconds."""
    started = time.perf_counter()
    model.multiply(layer, "o", 0, (x.data_ptr(), x.stride(0)), len(x), (y.data_ptr(), y.stride(0)))
    return time.perf_counter() - started


def make_copies(library: Library, kind: str, out: int, width: int, count: int, threads: int) -> Copies:
    """Packs `count` copies of a random matrix."""
    model = library.new(Spec(num_layers=count, threads=threads, num_kv_heads=1, head_dim=PANEL, block_size=PANEL))
    weight = torch.randn(out, width, dtype=torch.bfloat16) * width**-0.5
    chosen = KINDS[kind](weight)
    for layer in range(count):
        if isinstance(chosen, QuantizedWeight):
            model.set_quantized(layer, "o", 0, native_weight(chosen), chosen.shape, 0)
        else:
            model.set_matrix(layer, "o", 0, chosen.data_ptr(), (out, width), 0)
    return Copies(kind, model, count, model.weight_bytes() // count)


def pad_rows(x: Tensor) -> Tensor:
    """Returns the rows in bfloat16 with a stride like that of the library's own rows."""
    room = torch.zeros(len(x), -(-x.shape[1] // PANEL) * PANEL + PANEL, dtype=torch.bfloat16)
    room[:, : x.shape[1]] = x
    return room


def load(variant: Variant) -> Library:
    """Loads the library of a variant, and compiles it first if necessary."""
    cache = cache_directory("")
    assert cache is not None
    library = Library(find_library(variant, cache) or make_library(variant, cache))
    assert library.usable()
    return library


KINDS = {
    "bf16": lambda weight: weight,
    "int8": lambda weight: quantize_int8(weight),
    "int8_dynamic": lambda weight: quantize_int8(weight, "int8_dynamic"),
    "int4 g128": lambda weight: quantize_int4(weight, 128),
    "int4 g32 zp": lambda weight: quantize_int4(weight, 32, zero_points=True),
    "nf4 g64": lambda weight: quantize_nf4(weight, 64),
    "nf4 g64 dynamic": lambda weight: quantize_nf4(weight, 64, "int4_dynamic"),
    "nf4 g128 dynamic": lambda weight: quantize_nf4(weight, 128, "int4_dynamic"),
}


if __name__ == "__main__":
    main()
