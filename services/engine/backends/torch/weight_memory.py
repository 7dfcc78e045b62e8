"""Lists the memory of a loaded model's weights in the host's memory, for `canary.checksums`."""

from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass

import torch
from torch import Tensor

from antiphon.services.engine.backends.torch.adapters import AdapterStep
from antiphon.services.engine.worker.interface import WeightMemory


def host_weights(root: object) -> list[WeightMemory]:
    """Returns the memory of all tensors in the host's memory that an object's fields refer to, each once.

    `root` is an object with weights, such as `DecoderWeights`, or a torch module. Tensors on a device and tensors in a
    library's own layout are left out.
    """
    found: dict[int, WeightMemory] = {}
    for name, tensor in _tensors(root, "", set()):
        plain = tensor.device.type == "cpu" and tensor.layout is torch.strided and tensor.numel()
        if plain and tensor.is_contiguous():
            found.setdefault(tensor.data_ptr(), WeightMemory(name, tensor.data_ptr(), tensor.nbytes))
    return list(found.values())


def tensors_of(root: object) -> Iterator[Tensor]:
    """Yields the tensors that an object's fields refer to; one may come several times."""
    for _, tensor in _tensors(root, "", set()):
        yield tensor


def _tensors(value: object, name: str, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
        return
    # Skip the adapters' tables, which change whenever an adapter gets a slot.
    if id(value) in seen or isinstance(value, AdapterStep | str | bytes | int | float | None):
        return
    seen.add(id(value))
    if isinstance(value, torch.nn.Module):
        yield from value.named_parameters()
        return
    for part, inner in _parts(value):
        yield from _tensors(inner, f"{name}.{part}" if name else part, seen)


def _parts(value: object) -> Iterable[tuple[str, object]]:
    if isinstance(value, list | tuple):
        return [(str(index), inner) for index, inner in enumerate(value)]  # pyright: ignore[reportUnknownArgumentType,reportUnknownVariableType]
    if is_dataclass(value):
        return [(item.name, getattr(value, item.name)) for item in fields(value)]
    if type(value).__module__.startswith("antiphon.services.engine"):
        return list(getattr(value, "__dict__", {}).items())
    return []
