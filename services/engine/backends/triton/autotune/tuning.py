"""Chooses the forms of a model's products, as `--gpu-kernels` asks: by measuring, by the rule, or the ones it names.

On a GPU the products of every kind and shape that the model has are measured once, for 1, 2, 4, … rows up to the
largest step; a step has the form of the next larger number that was measured. A form that is missing, fails or is wrong
is left out, with a warning. The usual form stays unless another one is faster by more than what measurements differ by.
Of several ranks the slowest one's times count, because all must compute the same bits from the weights that each has.
Called by the worker when the weights are loaded, before it measures how much memory steps take.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from antiphon.services.engine.backends.triton.autotune.forms import Form, Product, Products
from antiphon.services.engine.backends.triton.autotune.kept import Kept, Measured, Times, measured_with
from antiphon.services.engine.backends.triton.autotune.measuring import (
    Timer,
    check,
    milliseconds,
    reference,
    rows_like,
    timer_of,
)
from antiphon.services.engine.parallel.communicator import ALONE_RANK, Communicator
from antiphon.shared.config import EngineSettings
from antiphon.shared.flags import SettingsError

logger = logging.getLogger(__name__)

SAME_BITS = {"plain": "fixed", "quantized": "tiles"}
"""The forms in which a row has the same bits in any batch (`--deterministic`)."""
_FASTER = 0.95
"""Share of the usual form's time that another one may take at most."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What `--gpu-kernels` asks for. `pinned`: names of forms by kind of product."""

    measures: bool
    anew: bool
    pinned: Mapping[str, str]


def asked(text: str, device: torch.device) -> Asked:
    """Returns what a valid value of the setting asks for on a device. Under the interpreter times mean nothing."""
    if text in ("auto", "measure"):
        return Asked(measures=device.type == "cuda" or text == "measure", anew=text == "measure", pinned={})
    pinned = dict(pair.split("=") for pair in text.split(",")) if text != "reference" else {}
    return Asked(measures=False, anew=False, pinned=pinned)


def tune_as_asked(
    settings: EngineSettings, products: Products, rows_max: int, like: Tensor, ranks: Communicator = ALONE_RANK
) -> None:
    """Sets the choice of each product as the settings ask. `rows_max`: of the largest step; for `like` see `tune`."""
    wanted = asked(settings.execution.gpu_kernels, like.device)
    if settings.execution.deterministic:
        if settings.execution.gpu_kernels != "auto":
            raise SettingsError("--gpu-kernels: --deterministic names the kernels; leave one of the two out")
        wanted = Asked(measures=False, anew=False, pinned=SAME_BITS)
    kept = Kept(settings.execution.compile_cache, measured_with(like.device)) if wanted.measures else None
    tune(products, rows_max, like, wanted, kept, timer_of(like.device), ranks)


def row_numbers(rows_max: int) -> list[int]:
    """Returns the numbers of rows that are measured: powers of two, and the largest."""
    return [*(1 << power for power in range((rows_max - 1).bit_length())), rows_max]


def tune(
    products: Products,
    rows_max: int,
    like: Tensor,
    wanted: Asked,
    kept: Kept | None,
    timer: Timer,
    ranks: Communicator = ALONE_RANK,
) -> None:
    """Sets the choice of each product. `like` has the type and the device of rows. Forgets the weights."""
    for product in products.found.values():
        pinned = product.choice.forms.get(wanted.pinned.get(product.choice.kind, ""))
        if pinned is not None:
            product.choice.choose([pinned.rows_max or rows_max], [pinned.name])
    if wanted.measures:
        known: Measured = {} if kept is None or wanted.anew else kept.read()
        numbers, before = row_numbers(rows_max), _count(known)
        for name, product in products.found.items():
            times, told = known.setdefault(name, {}), set[str]()
            for rows in numbers:
                if rows not in times and (found := _measured(name, product, rows, like, timer, told)):
                    times[rows] = found
        agreed = known if ranks.shard.size == 1 else _slowest(products, numbers, known, ranks)
        for name, product in products.found.items():
            times = agreed[name]
            product.choice.choose(numbers, [_fastest(product, rows, times.get(rows, {})) for rows in numbers])
        new = _count(known) - before
        if kept is not None and new:
            kept.write(known)
        logger.info(_table(products, numbers, new))
    products.found.clear()
    if like.device.type == "cuda":
        # What was measured with is the KV cache's now.
        torch.cuda.empty_cache()


def _slowest(products: Products, numbers: Sequence[int], known: Measured, ranks: Communicator) -> Measured:
    """Returns the time that the slowest rank takes for each form; None if a rank has none."""
    keys = [
        (name, rows, form.name)
        for name, product in sorted(products.found.items())
        for rows in numbers
        for form in product.choice.candidates(rows)
    ]
    own = [known[name].get(rows, {}).get(form) for name, rows, form in keys]
    slowest = -ranks.smallest_of_each(-np.array([np.inf if time is None else time for time in own]))
    found: Measured = {}
    for (name, rows, form), time in zip(keys, slowest.tolist(), strict=True):
        found.setdefault(name, {}).setdefault(rows, {})[form] = None if time == np.inf else time
    return found


def _count(measured: Measured) -> int:
    return sum(map(len, measured.values()))


def _measured(name: str, product: Product, rows: int, like: Tensor, timer: Timer, told: set[str]) -> Times:
    """Returns the times of the forms for a number of rows; none if there is no memory for measuring them.

    A form that is alone is not measured. `told`: forms of which a warning has said that they are left out.
    """
    forms = product.choice.candidates(rows)
    if len(forms) == 1:
        return {forms[0].name: 0.0}
    try:
        x = rows_like(product.weights[0], rows, like)
        expected = {way: reference(x, product.weights[0], in_fp8=way) for way in {form.in_fp8 for form in forms}}
    except torch.cuda.OutOfMemoryError:
        logger.warning("%s, %d rows: no memory is left to measure with, so the usual form computes them", name, rows)
        return {}
    return {form.name: _time(name, form, product, x, expected[form.in_fp8], timer, told) for form in forms}


def _time(
    name: str, form: Form, product: Product, x: Any, expected: Tensor, timer: Timer, told: set[str]
) -> float | None:
    try:
        check(form, x, product.weights[0], expected)
        return milliseconds(form, x, product.weights, timer)
    except Exception as error:  # a candidate is somebody else's code as well: whatever it raises, it is left out
        level = logging.DEBUG if form.name in told else logging.WARNING
        told.add(form.name)
        logger.log(level, "%s, %d rows: %s is left out: %s", name, len(x), form.name, error or type(error).__name__)
        return None


def _fastest(product: Product, rows: int, times: Times) -> str:
    """Returns the form that is the fastest, or the usual one if that is nearly as fast, or if none is right."""
    usual = product.choice.usual(rows)
    right = {name: time for name, time in times.items() if time is not None}
    if not right:
        return usual
    best = min(right, key=lambda name: right[name])
    return usual if usual in right and right[best] > _FASTER * right[usual] else best


def _table(products: Products, numbers: Sequence[int], new: int) -> str:
    """Returns which form computes how many rows of each product, a line for each."""
    lines = [f"the forms of products by rows ({new} measured now, the others before):"]
    for name, product in products.found.items():
        names = list(map(product.choice.name, numbers))
        ends = [place for place in range(len(names)) if place + 1 == len(names) or names[place] != names[place + 1]]
        lines.append(f"  {name}: " + ", ".join(f"{names[end]} up to {numbers[end]}" for end in ends))
    return "\n".join(lines)
