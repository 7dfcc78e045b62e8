"""Finds the tensors of a loaded model: those that its parts refer to."""

from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass

import torch
from torch import Tensor


def tensors_of(root: object, skipped: tuple[type, ...] = ()) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors that an object's fields refer to, with their names; one may come several times.

    `root`: an object with weights, such as `DecoderWeights`, or a torch module. Objects of `skipped` types are left
    out.
    """
    yield from _tensors(root, "", set(), (*skipped, str, bytes, int, float, type(None)))


def _tensors(value: object, name: str, seen: set[int], skipped: tuple[type, ...]) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
        return
    if id(value) in seen or isinstance(value, skipped):
        return
    seen.add(id(value))
    if isinstance(value, torch.nn.Module):
        yield from value.named_parameters()
        return
    for part, inner in _parts(value):
        yield from _tensors(inner, f"{name}.{part}" if name else part, seen, skipped)


def _parts(value: object) -> Iterable[tuple[str, object]]:
    if isinstance(value, list | tuple):
        return [(str(index), inner) for index, inner in enumerate(value)]  # pyright: ignore[reportUnknownArgumentType,reportUnknownVariableType]
    if is_dataclass(value):
        return [(item.name, getattr(value, item.name)) for item in fields(value)]
    if type(value).__module__.startswith("antiphon.services.engine"):
        return list(getattr(value, "__dict__", {}).items())
    return []
