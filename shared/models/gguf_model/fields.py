"""The metadata of a GGUF file whose keys begin with its architecture's name, and what makers of config.json share.

Called by `config` and the modules of single families beside it.
"""

from dataclasses import dataclass
from typing import Any

from antiphon.shared.models.gguf_model.reader import GgufModel

Config = dict[str, Any]
GELU: Config = {"hidden_activation": "gelu_pytorch_tanh"}
RECURRENT = frozenset({"lfm2", "lfm2moe", "granitehybrid", "jamba", "nemotron_h", "nemotron_h_moe"})
"""Architectures in which layers without attention have 0 key heads in the file."""
WITHOUT_ATTENTION = frozenset({"mamba", "mamba2"})
"""Architectures without attention and MLPs, which have no heads in the file."""
UNEVEN = frozenset({"gemma3n", "gemma4", "kimi-linear"})
"""Architectures with other heads, MLPs or positions than Llama's, which their own function reads."""


@dataclass(frozen=True, slots=True)
class Fields:
    """The metadata whose keys begin with the architecture's name (`llama.context_length`). `short`: the key's rest."""

    model: GgufModel

    @property
    def num_layers(self) -> int:
        """Number of layers without those that predict further tokens, which lie behind the others in a file."""
        return self.integer("block_count") - self.integer("nextn_predict_layers", 0)

    def name(self, short: str) -> str:
        """Returns the whole key."""
        return f"{self.model.architecture}.{short}"

    def has(self, short: str) -> bool:
        """Whether the file has the key."""
        return self.model.has(self.name(short))

    def integer(self, short: str, default: int | None = None, *, some: bool = False) -> int:
        """Returns a whole number, see `GgufModel.uniform_integer`."""
        return self.model.uniform_integer(self.name(short), default, some=some)

    def number(self, short: str, default: float | None = None) -> float:
        """Returns a number."""
        return self.model.number(self.name(short), default)

    def numbers(self, short: str) -> list[float]:
        """Returns a number for each layer."""
        values = self.model.numbers(self.name(short))
        if len(values) != self.num_layers:
            raise self.model.fail(f"{self.name(short)} has {len(values)} numbers for {self.num_layers} layers")
        return values

    def string(self, short: str, default: str) -> str:
        """Returns a string."""
        return self.model.string(self.name(short), default)

    def flag(self, short: str, default: bool) -> bool:
        """Returns what is true or false."""
        return self.model.boolean(self.name(short), default)

    def each(self, short: str, default: int | None = None) -> list[int]:
        """Returns a whole number for each layer, also of a field that has one for all."""
        if self.has(short) and self.model.is_array(self.name(short)):
            return self.per_layer(short)
        return [self.integer(short, default)] * self.num_layers

    def per_layer(self, short: str) -> list[int]:
        """Returns a whole number for each layer; flags are 0 or 1."""
        values = self.model.integers(self.name(short))
        if len(values) not in (self.num_layers, self.integer("block_count")):
            raise self.model.fail(f"{self.name(short)} has {len(values)} numbers for {self.num_layers} layers")
        return values[: self.num_layers]


def named(name: str, model_type: str = "") -> Config:
    """Returns the fields that name an architecture. `model_type`: if it is not the name in small letters."""
    found = model_type or name.lower().replace("moe", "_moe")
    return {"architectures": [f"{name}ForCausalLM"], "model_type": found}


def window(fields: Fields) -> Config:
    """Returns the sliding window of attention; {} without one."""
    size = fields.integer("attention.sliding_window", 0)
    return {"sliding_window": size} if size else {}
