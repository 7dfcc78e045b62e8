"""Experts that a checkpoint stores in one tensor for each of their two matrices, as tensors of each expert.

Some checkpoints of a family have `experts.gate_up_proj` [experts, 2 m, hidden] and `experts.down_proj` [experts,
hidden, m], or both transposed, and others `experts.0.gate_proj.weight` and so on, as quantized checkpoints do. Called
by `checkpoint` and the quantizer.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import replace

from torch import Tensor

from antiphon.services.engine.models.layout import Parameter, Source

_OF_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
_OF_ALL = re.compile(r"(.*\.experts)\.(gate_up|down)_proj")
_FUSED = {"gate": "gate_up_proj", "up": "gate_up_proj", "down": "down_proj"}


class FusedExperts:
    """The tensors `wanted` of single experts that are parts of tensors `stored`, which `get` returns."""

    def __init__(self, wanted: Iterable[str], stored: Iterable[str], get: Callable[[str], Tensor]) -> None:
        self._get, self._found = get, dict[str, tuple[str, int, str]]()
        present = set(stored)
        for name in wanted:
            match = _OF_EXPERT.fullmatch(name)
            if match is not None and name not in present:
                experts, number, kind = match.groups()
                if f"{experts}.{_FUSED[kind]}" in present:
                    self._found[name] = experts, int(number), kind

    @property
    def parts(self) -> set[str]:
        """The stored tensors that are divided."""
        return {f"{experts}.{_FUSED[kind]}" for experts, _, kind in self._found.values()}

    def keys(self) -> Iterable[str]:
        """Returns the names of the tensors of experts."""
        return self._found.keys()

    def get_tensor(self, name: str) -> Tensor:
        """Returns a matrix [out, in] of an expert."""
        experts, number, kind = self._found[name]
        up, down = self._get(f"{experts}.gate_up_proj"), self._get(f"{experts}.down_proj")
        in_rows = up.shape[1] == 2 * down.shape[2] and up.shape[2] == down.shape[1]
        matrix = (down if kind == "down" else up)[number]
        matrix = matrix if in_rows else matrix.t()
        if kind == "down":
            return matrix
        return matrix.chunk(2)[kind == "up"]

    def get_shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of such a matrix."""
        return tuple(self.get_tensor(name).shape)


def apart(parameter: Parameter) -> Parameter | None:
    """Returns a parameter that is one tensor of all experts as tensors of each expert; None for other parameters."""
    match = _OF_ALL.fullmatch(parameter.sources[0].name)
    if match is None or not parameter.stacked or parameter.alternating:
        return None
    experts, kind = match.groups()
    count, *shape = parameter.sources[0].shape
    out, width = reversed(shape) if parameter.transposed else shape
    names = ("gate", "up") if kind == "gate_up" else ("down",)
    sources = (
        Source(f"{experts}.{number}.{name}_proj.weight", (out // len(names), width))
        for number in range(count)
        for name in names
    )
    return replace(parameter, sources=tuple(sources), transposed=False, stacked=False, experts=count)


def stored_apart(parameters: Iterable[Parameter], has: Callable[[str], bool]) -> dict[str, Parameter]:
    """Returns by name the parameters that are one tensor in the layout, as the tensors of each expert that files have.

    `has`: whether the files have a tensor, plain or quantized.
    """
    found = {parameter.name: apart(parameter) for parameter in parameters}
    return {name: each for name, each in found.items() if each is not None and has(each.sources[0].name)}
