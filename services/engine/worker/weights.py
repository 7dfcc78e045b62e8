"""Reads a checkpoint into a decoder: memory-mapped safetensors, one parameter after the other.

A parameter's tensors are joined, converted and packed before the next one is read, so that loading needs little more
than the model itself. A checkpoint that does not fit its config is a `ServiceError` that names the tensors. The file's
header is checked by the safetensors library, which never executes anything. Called by the torch worker at start-up.
"""

import json
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from services.engine.models.decoder import DecoderWeights, LayerWeights
from services.engine.models.description import DecoderDescription
from services.engine.models.layout import IGNORED_SUFFIXES, Parameter, Source, ignored_names
from services.engine.models.linear import DenseLinear, Linear, can_pack, make_linear
from shared.errors import ServiceError

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_NAMES_SHOWN = 5


class Checkpoint:
    """The open files of a checkpoint. Use as a context manager; tensors it gave stay valid after it."""

    def __init__(self, model_dir: Path) -> None:
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}
        """Tensor name → the open file that has it."""
        for path in _weight_files(model_dir):
            try:
                file = self._stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise _unusable(f"{path} cannot be read as safetensors: {error}") from error
            self._files.update(dict.fromkeys(file.keys(), file))

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def check(self, parameters: Iterable[Parameter], ignored: frozenset[str]) -> None:
        """Raises `ServiceError` naming tensors that are missing, have the wrong shape or belong to nothing."""
        wanted = {source.name: source for parameter in parameters for source in parameter.sources}
        missing = sorted(wanted.keys() - self._files.keys())
        if missing:
            raise _unusable(f"the checkpoint lacks {_listed(missing)}.")
        extra = [name for name in self._files.keys() - wanted.keys() - ignored if not name.endswith(IGNORED_SUFFIXES)]
        if extra:
            raise _unusable(f"the checkpoint has tensors that this model does not use: {_listed(sorted(extra))}.")
        for source in wanted.values():
            self._check_shape(source)

    def read(self, parameter: Parameter, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The parameter's tensors joined along their first dimension.

        A single tensor of the right type on a CPU is the file's own pages: reading it copies nothing.
        """
        sources = parameter.sources
        if len(sources) == 1:
            return self._tensor(sources[0].name).to(device=device, dtype=dtype)
        rows = sum(source.shape[0] for source in sources)
        joined = torch.empty((rows, *sources[0].shape[1:]), dtype=dtype, device=device)
        for source, part in zip(sources, joined.split([source.shape[0] for source in sources]), strict=True):
            part.copy_(self._tensor(source.name))
        return joined

    def is_mapped(self, parameter: Parameter, dtype: torch.dtype, device: torch.device) -> bool:
        """True when `read` gives the file's own pages."""
        sources = parameter.sources
        return device.type == "cpu" and len(sources) == 1 and self._tensor(sources[0].name).dtype == dtype

    def _tensor(self, name: str) -> Tensor:
        return self._files[name].get_tensor(name)

    def _check_shape(self, source: Source) -> None:
        shape = tuple(self._files[source.name].get_slice(source.name).get_shape())
        if shape != source.shape:
            raise _unusable(f"tensor {source.name} has shape {shape}, but config.json asks for {source.shape}.")


def load_weights(
    model_dir: Path,
    description: DecoderDescription,
    layout: tuple[Parameter, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> DecoderWeights:
    """The decoder's weights on the device, in the forms that are fastest there."""
    with Checkpoint(model_dir) as checkpoint:
        checkpoint.check(layout, ignored_names(description))
        loader = _Loader(checkpoint, {parameter.name: parameter for parameter in layout}, dtype, device)
        embedding = loader.tensor("embedding")
        return DecoderWeights(
            embedding=embedding,
            layers=tuple(_layer(loader, description, index) for index in range(description.num_layers)),
            final_norm=loader.owned("final_norm"),
            head=_tied_head(embedding, loader) if description.tied_embeddings else loader.linear("head"),
        )


class _Loader:
    """Reads parameters by name."""

    def __init__(
        self, checkpoint: Checkpoint, parameters: dict[str, Parameter], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._checkpoint, self._parameters = checkpoint, parameters
        self._dtype, self._device = dtype, device

    def tensor(self, name: str) -> Tensor:
        return self._checkpoint.read(self._parameters[name], self._dtype, self._device)

    def owned(self, name: str) -> Tensor:
        """A tensor that every step reads is not left to the page cache."""
        return self.tensor(name).clone() if self.is_mapped(name) else self.tensor(name)

    def linear(self, name: str) -> Linear:
        packs = can_pack(self._dtype, self._device)
        weight = (self.tensor if packs else self.owned)(f"{name}.weight")
        return make_linear(weight, self.owned(f"{name}.bias") if f"{name}.bias" in self._parameters else None)

    def is_mapped(self, name: str) -> bool:
        return self._checkpoint.is_mapped(self._parameters[name], self._dtype, self._device)


def _layer(loader: _Loader, description: DecoderDescription, index: int) -> LayerWeights:
    name = f"layers.{index}"
    qk_norm = None
    if description.qk_norm:
        heads = ((f"{name}.q_norm", description.num_heads), (f"{name}.k_norm", description.num_kv_heads))
        qk_norm = torch.cat([loader.tensor(norm).expand(count, -1) for norm, count in heads])
    return LayerWeights(
        input_norm=loader.owned(f"{name}.input_norm"),
        qkv=loader.linear(f"{name}.qkv"),
        o=loader.linear(f"{name}.o"),
        mlp_norm=loader.owned(f"{name}.mlp_norm"),
        gate_up=loader.linear(f"{name}.gate_up"),
        down=loader.linear(f"{name}.down"),
        qk_norm=qk_norm,
    )


def _tied_head(embedding: Tensor, loader: _Loader) -> Linear:
    """Packing needs a second copy of the matrix: only where the first one is the file's pages and costs nothing."""
    return make_linear(embedding) if loader.is_mapped("embedding") else DenseLinear(embedding)


def _weight_files(model_dir: Path) -> list[Path]:
    """The single file, or the files that the index lists."""
    if (model_dir / _SINGLE).is_file():
        return [model_dir / _SINGLE]
    index = model_dir / _INDEX
    if not index.is_file():
        raise _unusable(f"{model_dir} has neither {_SINGLE} nor {_INDEX}.")
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise _unusable(f"{index} is not an index of safetensors files.") from error
    unsafe = [name for name in names if not isinstance(name, str) or Path(name).name != name]
    if unsafe:
        raise _unusable(f"{index} names files outside the model directory: {_listed(unsafe)}.")
    lost = [name for name in names if not (model_dir / name).is_file()]
    if lost:
        raise _unusable(f"{index} names files that are not there: {_listed(lost)}.")
    return [model_dir / name for name in names]


def _unusable(message: str) -> ServiceError:
    return ServiceError("invalid_value", f"The model cannot be loaded: {message}", param="model")


def _listed(names: list[str]) -> str:
    more = len(names) - _NAMES_SHOWN
    return ", ".join(map(str, names[:_NAMES_SHOWN])) + (f" and {more} more" if more > 0 else "")
