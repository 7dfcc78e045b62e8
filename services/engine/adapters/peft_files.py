"""Reads LoRA adapters and prompt adapters in peft's format, and maps LoRA tensors to the decoder's parameters.

peft names a tensor `base_model.model.<module>.lora_A.weight`, where <module> is the name of the module in the model of
transformers: the names of `layout`, without `.weight`. No tensor is ignored: if a tensor is not a LoRA matrix of a
projection of the attention or the MLP, the whole adapter is refused, with the tensor's name.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from antiphon.services.engine.adapters.delta import TARGETS, AdapterWeights, Block, Delta, Place
from antiphon.services.engine.models.layout import Grouping, Parameter
from antiphon.shared.models.adapter_config import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    LoraConfig,
    adapter_kind,
    check_rank,
    check_tokens,
    no_file,
    open_regular,
    read_lora_config,
    read_prompt_config,
    unusable,
)

_PREFIX = "base_model.model."
_VIRTUAL = "prompt_embeddings"
_A, _B = ".lora_A.weight", ".lora_B.weight"
_READ_BYTES = 2**20
_KINDS: Mapping[str, str] = {
    "lora_embedding_": "it changes embeddings",
    "lora_magnitude_vector": "it is a DoRA adapter",
    "modules_to_save": "it replaces whole modules",
    "bias": "it has biases",
}
"""Parts of the names of unsupported tensors; for each, the reason that is given when an adapter has such a tensor."""


_Stamp = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Module:
    """A module of the checkpoint that an adapter may change: a part of a parameter of the decoder."""

    place: Place
    row: int
    num_rows: int
    num_inputs: int
    order: int
    """Index of the part within the parameter."""


@dataclass(frozen=True, slots=True)
class _Part:
    """The low-rank product that an adapter adds to one module: `a` [rank, in], `b` [out, rank], scaled."""

    module: _Module
    a: Tensor
    b: Tensor


class AdapterReader:
    """Reads adapters of one model, whose parameters `layout` lists.

    `max_rank` and `max_tokens`: maximum rank of a LoRA adapter and maximum number of virtual tokens of a prompt
    adapter; 0: adapters of that kind are not supported. `hidden_size`: width of the model's embeddings.
    """

    def __init__(self, layout: Iterable[Parameter], max_rank: int, max_tokens: int = 0, hidden_size: int = 0) -> None:
        self._max_rank, self._max_tokens, self._hidden_size = max_rank, max_tokens, hidden_size
        self._versions: dict[Path, tuple[_Stamp, str]] = {}
        """The version of each directory that was read, and the state of its files at that time."""
        self._modules: dict[str, _Module] = {}
        self._groupings: dict[Place, Grouping] = {}
        self._others: set[str] = set()
        """Modules of the model that an adapter cannot change."""
        for parameter in layout:
            self._add(parameter)

    def version(self, directory: Path, name: str) -> str:
        """Returns a hash of the adapter's files. Raises ServiceError('not_found') if one cannot be read.

        Files are read again only if their size or modification time has changed.
        """
        stamp = _stamp(directory)
        known = self._versions.get(directory)
        if known is not None and stamp == known[0]:
            return known[1]
        digest = hashlib.sha256()
        for file in (CONFIG_FILE, WEIGHTS_FILE):
            try:
                with open_regular(directory / file) as content:
                    while part := content.read(_READ_BYTES):
                        digest.update(part)
            except OSError as error:
                raise no_file(name, directory, file) from error
        version = digest.hexdigest()[:32]
        if stamp:
            self._versions[directory] = stamp, version
        return version

    def read(self, directory: Path, name: str) -> AdapterWeights:
        """Returns the adapter in a directory. Raises ServiceError that names the adapter and the problem."""
        if adapter_kind(directory, name) == "PROMPT_TUNING":
            return self._read_prompt(directory, name)
        config = read_lora_config(directory, name)
        if not self._max_rank:
            raise unusable(name, "this engine serves no LoRA adapters: start it with --enable-lora")
        check_rank(config, name, self._max_rank)
        version = self.version(directory, name)
        parts: dict[Place, list[_Part]] = {}
        rank = 0
        for part in self._parts(_tensors(directory / WEIGHTS_FILE, name), config, name):
            parts.setdefault(part.module.place, []).append(part)
            rank = max(rank, part.a.shape[0])
        if not parts:
            raise unusable(name, f"{WEIGHTS_FILE} has no tensors")
        if self.version(directory, name) != version:
            raise unusable(name, "its files changed while they were read: load it again")
        return AdapterWeights(version, rank, {place: self._joined(place, some) for place, some in parts.items()})

    def _read_prompt(self, directory: Path, name: str) -> AdapterWeights:
        config = read_prompt_config(directory, name)
        if not self._max_tokens:
            raise unusable(name, "this engine serves no prompt adapters: start it with --enable-prompt-adapter")
        check_tokens(config, name, self._max_tokens)
        version, tensors = self.version(directory, name), _tensors(directory / WEIGHTS_FILE, name)
        virtual = tensors.pop(_VIRTUAL, None)
        if virtual is None or tensors:
            others = ", ".join(sorted(tensors)[:3]) or "nothing"
            raise unusable(name, f"{WEIGHTS_FILE} must hold {_VIRTUAL} alone, and holds {others}")
        wanted = (config.num_virtual_tokens, self._hidden_size)
        if tuple(virtual.shape) != wanted:
            raise unusable(
                name,
                f"{_VIRTUAL} has shape {tuple(virtual.shape)}, and the model and the configuration ask for {wanted}",
            )
        if not bool(torch.isfinite(virtual).all()):
            raise unusable(name, f"{_VIRTUAL} has numbers that are not finite")
        return AdapterWeights(version, 0, {}, virtual.to(torch.float32))

    def _parts(self, tensors: Mapping[str, Tensor], config: LoraConfig, name: str) -> Iterator[_Part]:
        names = sorted({self._module_name(key, name) for key in tensors})
        for module_name in names:
            module = self._find(module_name, name)
            a, b = (tensors.get(f"{_PREFIX}{module_name}{suffix}") for suffix in (_A, _B))
            if a is None or b is None:
                lacks = f"{_PREFIX}{module_name}{_A if a is None else _B}"
                raise unusable(name, f"{WEIGHTS_FILE} lacks {lacks}")
            rank = config.rank_of(module_name)
            wanted = {_A: (rank, module.num_inputs), _B: (module.num_rows, rank)}
            for suffix, tensor in ((_A, a), (_B, b)):
                if tuple(tensor.shape) != wanted[suffix]:
                    raise unusable(
                        name,
                        f"{_PREFIX}{module_name}{suffix} has shape {tuple(tensor.shape)}, and the model and the rank "
                        f"ask for {wanted[suffix]}",
                    )
                if not bool(torch.isfinite(tensor).all()):
                    raise unusable(name, f"{_PREFIX}{module_name}{suffix} has numbers that are not finite")
            yield _Part(module, a.to(torch.float32), b.to(torch.float32) * config.scale_of(module_name))

    def _joined(self, place: Place, parts: list[_Part]) -> Delta:
        parts.sort(key=lambda part: part.module.order)
        out = max(module.row + module.num_rows for module in self._modules.values() if module.place == place)
        rank = sum(part.a.shape[0] for part in parts)
        b, blocks, first = torch.zeros(out, rank), [], 0
        for part in parts:
            module, end = part.module, first + part.a.shape[0]
            rows = part.b if place not in self._groupings else _sorted_heads(part.b, self._groupings[place])
            b[module.row : module.row + module.num_rows, first:end] = rows
            blocks.append(Block(module.row, module.row + module.num_rows, first, end))
            first = end
        return Delta(torch.cat([part.a for part in parts]), b, tuple(blocks))

    def _module_name(self, key: str, name: str) -> str:
        for part, what in _KINDS.items():
            if part in key:
                raise unusable(name, f"{what}, which is not supported (tensor {key})")
        if not key.startswith(_PREFIX) or not key.endswith((_A, _B)):
            raise unusable(name, f"the tensor {key} is not a LoRA matrix of peft's format")
        return key.removeprefix(_PREFIX).removesuffix(_A).removesuffix(_B)

    def _find(self, module_name: str, name: str) -> _Module:
        module = self._modules.get(module_name)
        if module is None and module_name in self._others:
            raise unusable(
                name, f"it changes {module_name}; here adapters change the projections of attention and MLP alone"
            )
        if module is None:
            raise unusable(name, f"it changes {module_name}, which this model does not have")
        return module

    def _add(self, parameter: Parameter) -> None:
        layer, _, rest = parameter.name.removeprefix("layers.").partition(".")
        target, _, kind = rest.rpartition(".")
        is_target = parameter.name.startswith("layers.") and target in TARGETS and kind == "weight"
        row = 0
        for order, source in enumerate(parameter.sources):
            names = _names(source.name)
            if not is_target:
                self._others.update(names)
                continue
            shape = source.shape[::-1] if parameter.transposed else source.shape
            module = _Module(place=(int(layer), target), row=row, num_rows=shape[0], num_inputs=shape[1], order=order)
            row += shape[0]
            self._modules.update(dict.fromkeys(names, module))
            if parameter.grouping is not None:
                self._groupings[module.place] = parameter.grouping


def _stamp(directory: Path) -> _Stamp:
    """Returns size, modification time and inode of each of the adapter's files; empty if a file is missing."""
    try:
        states = [(directory / file).stat() for file in (CONFIG_FILE, WEIGHTS_FILE)]
    except (OSError, ValueError):  # ValueError: of a path with a zero byte
        return ()
    return tuple(number for state in states for number in (state.st_size, state.st_mtime_ns, state.st_ino))


def _names(source: str) -> tuple[str, str]:
    """Returns the possible names of a tensor's module: in the model with a head, and in the model without one."""
    module = source.removesuffix(".weight").removesuffix(".bias")
    return module, module.partition(".")[2]


def _sorted_heads(rows: Tensor, grouping: Grouping) -> Tensor:
    """Reorders the rows of a fused projection that is grouped by key head, as is done with the decoder's weights."""
    heads = rows.view(grouping.num_groups, -1, grouping.head_dim, *rows.shape[1:])
    return torch.cat([part.flatten(0, 2) for part in (heads[:, :-2], heads[:, -2:-1], heads[:, -1:])])


def _tensors(path: Path, name: str) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as opened:
            file: Any = opened
            return {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise unusable(name, f"{path} cannot be read as safetensors ({error})") from error
