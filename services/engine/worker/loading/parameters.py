"""Reads the parameters of a decoder by name, for every backend: plain tensors, and matrices that may be quantized.

The layout lists the tensors of the checkpoint that make up a parameter, the checkpoint reader joins them, and a
quantizer, if there is one, quantizes plain matrices. The backends convert the result to their own form. Called by
`weights.py` (PyTorch and Triton) and `cpu/decoder.py` (C++).
"""

import itertools
import logging
import re
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from antiphon.services.engine.models.description import DecoderDescription
from antiphon.services.engine.models.layout import Parameter, ignored_names
from antiphon.services.engine.parallel.shard import ALONE, Shard, sharded, sharded_bias
from antiphon.services.engine.quantization.choice import WeightForm
from antiphon.services.engine.quantization.weight import QuantizedWeight
from antiphon.services.engine.worker.loading.checkpoint import Checkpoint
from antiphon.services.engine.worker.loading.drawn import DrawnTensors
from antiphon.services.engine.worker.loading.kv_scales import KvFactors, Matrix, read_factors

logger = logging.getLogger(__name__)

_LAYER = re.compile(r"layers\.\d+\.")


class ParameterReader:
    """The parameters of a checkpoint. Use as a context manager; tensors read from it stay valid afterwards."""

    def __init__(
        self,
        model_dir: Path,
        description: DecoderDescription,
        layout: tuple[Parameter, ...],
        dtype: torch.dtype,
        device: torch.device,
        form: WeightForm,
        shard: Shard = ALONE,
    ) -> None:
        """Opens and checks the files. Raises `ServiceError` naming tensors that are missing, wrong or superfluous.

        `description` and `layout` are those of the whole model; a rank reads only its `shard`. The rank's layers are
        numbered from 0.
        """
        if form.is_drawn:
            drawn = Checkpoint.in_memory(DrawnTensors(layout, device))
            self._start(drawn, description, layout, dtype, device, form, shard)
            return
        checkpoint = Checkpoint(model_dir, form.method, smoothquant=form.is_smoothquant)
        try:
            checkpoint.check(layout, ignored_names(description))
        except BaseException:
            checkpoint.close()
            raise
        self._start(checkpoint, description, layout, dtype, device, form, shard)

    @classmethod
    def over(
        cls, checkpoint: Checkpoint, description: DecoderDescription, layout: tuple[Parameter, ...], dtype: torch.dtype
    ) -> "ParameterReader":
        """Returns the reader of a checkpoint on the CPU, which is open and may be a part of a model."""
        reader = cls.__new__(cls)
        reader._start(checkpoint, description, layout, dtype, torch.device("cpu"), WeightForm(), ALONE)
        return reader

    def _start(
        self,
        checkpoint: Checkpoint,
        description: DecoderDescription,
        layout: tuple[Parameter, ...],
        dtype: torch.dtype,
        device: torch.device,
        form: WeightForm,
        shard: Shard,
    ) -> None:
        self._checkpoint, self._dtype, self._device, self._form = checkpoint, dtype, device, form
        self._description, self.shard = description, shard
        self._first_layer = shard.layers(description.num_layers).start
        self._parameters = {parameter.name: parameter for parameter in layout}
        self._factors = KvFactors()
        if form.kv_scales:
            self._factors = read_factors(checkpoint, self._parameters, description, form)
        self._made_plain: list[str] = []
        """Matrices that were quantized and were returned as plain tensors."""
        self.read_bytes = 0
        """Bytes of all returned parameters, in their returned form."""

    def __enter__(self) -> "ParameterReader":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._checkpoint.close()
        if self._made_plain:
            logger.warning("%s", made_plain(self._made_plain, self._dtype))

    def has(self, name: str) -> bool:
        """Whether the model has a parameter."""
        return self._global(name) in self._parameters

    def tensor(self, name: str) -> Tensor:
        """Returns a parameter as a plain tensor of the compute data type."""
        parameter = self._parameters[self._global(name)]
        tensor = self._checkpoint.read(parameter, self._dtype, self._device)
        return self._counted(self._factors.folded(parameter.name, tensor))

    def owned(self, name: str) -> Tensor:
        """Returns a plain tensor, copied if it would be the file's mapped pages.

        Used for tensors that every step reads: the system could evict mapped pages.
        """
        tensor = self.tensor(name)
        return tensor.clone() if self.is_mapped(name) else tensor

    def matrix(self, name: str) -> Matrix:
        """Returns the weight [out, in] of a linear layer, such as `layers.3.qkv`: quantized, or a plain tensor.

        For a matrix that is split over ranks, returns the rank's part.
        """
        parameter = self._parameters[self._global(f"{name}.weight")]
        return self._own_part(name, parameter, self._checkpoint.matrix(parameter, self._dtype, self._device))

    def matrices(self, name: str, rows: int) -> list[Matrix]:
        """Returns a weight like `matrix`, or as several quantized ones on top of each other.

        There are several if its tensors are stored in different ways; all but the last have a multiple of `rows` rows.
        """
        if self.shard.size > 1:
            return [self.matrix(name)]
        parameter = self._parameters[self._global(f"{name}.weight")]
        parts = self._checkpoint.matrices(parameter, self._dtype, self._device, rows)
        if len(parts) == 1:
            return [self._own_part(name, parameter, parts[0])]
        firsts = itertools.accumulate((part.shape[0] for part in parts), initial=0)
        parts = [self._factors.folded_matrix(parameter.name, *each) for each in zip(parts, firsts, strict=False)]
        self.read_bytes += sum(part.nbytes for part in parts)
        return parts

    def _own_part(self, name: str, parameter: Parameter, weight: Matrix) -> Matrix:
        was_quantized = isinstance(weight, QuantizedWeight) or self._checkpoint.is_quantized(parameter)
        weight = self.rounded(name, weight) if isinstance(weight, Tensor) else weight
        weight = self._factors.folded_matrix(parameter.name, weight)
        part = sharded(within_layer(name), weight, self._layer_of(name), self.shard)
        # If the rank's columns are not whole quantization groups, they are dequantized.
        if isinstance(part, Tensor):
            if was_quantized or isinstance(weight, QuantizedWeight):
                self._made_plain.append(name)
            return self._counted(part.to(self._dtype))
        self.read_bytes += part.nbytes
        return part

    def _layer_of(self, name: str) -> DecoderDescription:
        """Returns the description of the layer that a parameter belongs to; that of the whole model if to none."""
        first, _, rest = self._global(name).partition(".")
        return self._description.of_layer(int(rest.partition(".")[0])) if first == "layers" else self._description

    def folded_norms(self, layer: int, norms: Tensor) -> Tensor:
        """Returns the weights of the norms of a layer's queries and keys, a row for each head, with their factors."""
        name = f"layers.{layer}"
        return self._factors.folded_norms(layer + self._first_layer, norms, self._layer_of(f"{name}.qkv"), self.shard)

    def plain_matrix(self, name: str) -> Tensor:
        """Like `matrix`, but always returns a plain tensor: dequantized, and never the file's mapped pages."""
        weight = self._checkpoint.read(self._parameters[self._global(f"{name}.weight")], self._dtype, self._device)
        part = sharded(within_layer(name), weight, self._description, self.shard)
        assert isinstance(part, Tensor)
        return self._counted(part.clone() if self.is_mapped(f"{name}.weight") else part)

    def rounded(self, name: str, weight: Tensor) -> Matrix:
        """Returns a plain weight quantized by the quantizer; unchanged if the matrix of that name is not quantized."""
        quantize = self._form.quantize
        return weight if quantize is None else quantize(within_layer(name), weight)

    def tied_head(self, embedding: Tensor) -> Matrix:
        """Returns the output head of a model that uses the embedding as its head: quantized, or the same tensor.

        A quantized head is a second matrix: as it is stored, or rounded here.
        """
        parameter, head = self._parameters["embedding"], embedding
        if self._description.has_head and self._form.quantize is not None:
            head = self.rounded("head", embedding)
        elif self._description.has_head and self._checkpoint.is_quantized(parameter):
            head = self._checkpoint.matrix(parameter, self._dtype, self._device)
        if isinstance(head, QuantizedWeight):
            self.read_bytes += head.nbytes
        return head

    def floats(self, name: str) -> Tensor:
        """Returns a plain tensor as float32, with its values rounded to the compute data type."""
        return self.tensor(name).to(torch.float32)

    def exact(self, name: str) -> Tensor:
        """Returns a plain tensor as float32 with the checkpoint's full precision."""
        tensor = self._checkpoint.read(self._parameters[self._global(name)], torch.float32, self._device)
        return self._counted(tensor.clone())

    def bias(self, name: str) -> Tensor | None:
        """Returns the bias of a linear layer or norm in the computing type; None if it has none.

        For a matrix that is split over ranks, returns the bias of the rank's part.
        """
        if not self.has(f"{name}.bias"):
            return None
        own = self._layer_of(name)
        return sharded_bias(within_layer(name), self.owned(f"{name}.bias"), own, self.shard)

    def is_mapped(self, name: str) -> bool:
        """Whether `tensor` returns the mapped pages of the file instead of a copy."""
        parameter = self._parameters[self._global(name)]
        mapped = self._checkpoint.is_mapped(parameter, self._dtype, self._device)
        return mapped and not self._factors.has(parameter.name)

    def _counted(self, tensor: Tensor) -> Tensor:
        self.read_bytes += tensor.nbytes
        return tensor

    def _global(self, name: str) -> str:
        """Returns a parameter's name in the whole model, where layers have other numbers than on the rank."""
        if not self._first_layer or not _LAYER.match(name):
            return name
        _, layer, rest = name.split(".", 2)
        return f"layers.{int(layer) + self._first_layer}.{rest}"


def made_plain(names: Sequence[str], dtype: torch.dtype) -> str:
    """Returns the log line about quantized matrices that were dequantized while loading."""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return (
        f"quantization: {names[0]}{more} became {str(dtype).removeprefix('torch.')} weights while loading, which take "
        "the memory of unquantized ones: this backend multiplies no weights that are quantized in their way"
    )


def stream_router(reader: ParameterReader, prefix: str) -> Tensor:
    """Returns the router of a layer's streams [streams, hidden] float32, with the factors of what it reads."""
    router, norm = reader.exact(f"{prefix}.streams.router"), reader.exact(f"{prefix}.streams.norm")
    return router * (norm / len(norm))


def within_layer(name: str) -> str:
    """Returns a matrix's name without its layer, such as `qkv` for `layers.3.qkv`."""
    return _LAYER.sub("", name)
