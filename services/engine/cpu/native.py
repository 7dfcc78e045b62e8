"""The C++ library as Python sees it: `source/abi.h` field by field, and nothing more.

Whoever calls keeps the memory alive that it hands over by address. Called by the CPU worker.
"""

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, c_char_p, c_float, c_int, c_int64, c_void_p
from pathlib import Path
from typing import Any

_SPEC_INTEGERS = (
    "vocab_size",
    "hidden_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "intermediate_size",
    "block_size",
    "threads",
    "norm",
    "activation",
    "residual",
    "gated_mlp",
    "shared_norm",
    "qk_norm",
    "wide",
    "learned_position_offset",
    "num_experts",
    "experts_per_token",
    "expert_size",
    "shared_expert_size",
    "normalise_experts",
)
_SPEC_FLOATS = ("norm_eps", "query_scale", "attention_softcap", "logits_softcap", "embedding_scale")
_STEP_INTEGERS = ("num_tokens", "num_sequences", "num_logits", "num_rows", "table_width")
_STEP_POINTERS = (
    "ids",
    "positions",
    "query_start_loc",
    "block_tables",
    "logit_tokens",
    "logit_rows",
    "logits",
    "best",
    "best_logit",
    "log_total",
)


class Spec(ctypes.Structure):
    """`antiphon_Spec`."""

    _fields_ = [(name, c_int64) for name in _SPEC_INTEGERS] + [(name, c_float) for name in _SPEC_FLOATS]


class Step(ctypes.Structure):
    """`antiphon_Step`."""

    _fields_ = [(name, c_int64) for name in _STEP_INTEGERS] + [(name, c_void_p) for name in _STEP_POINTERS]


class Quantized(ctypes.Structure):
    """`antiphon_Quantized`."""

    _fields_ = [(name, c_int64) for name in ("kind", "group", "two_a_byte", "has_sign")] + [
        (name, c_void_p) for name in ("weight", "scales", "zeros", "levels")
    ]


_SIGNATURES: dict[str, tuple[Any, Sequence[Any]]] = {
    "antiphon_error": (c_char_p, ()),
    "antiphon_usable": (c_int, ()),
    "antiphon_new": (c_void_p, (POINTER(Spec),)),
    "antiphon_free": (None, (c_void_p,)),
    "antiphon_set_matrix": (c_int, (c_void_p, c_int64, c_char_p, c_int64, c_void_p, c_int64, c_int64, c_void_p)),
    "antiphon_set_packed": (c_int, (c_void_p, c_int64, c_char_p, c_int64, c_void_p, c_int64, c_int64, c_void_p)),
    "antiphon_packed": (c_void_p, (c_void_p, c_int64, c_char_p, c_int64, POINTER(c_int64))),
    "antiphon_set_quantized": (
        c_int,
        (c_void_p, c_int64, c_char_p, c_int64, POINTER(Quantized), c_int64, c_int64, c_void_p),
    ),
    "antiphon_set_vector": (c_int, (c_void_p, c_int64, c_char_p, c_void_p, c_int64)),
    "antiphon_set_table": (c_int, (c_void_p, c_int64, c_char_p, c_void_p)),
    "antiphon_set_window": (c_int, (c_void_p, c_int64, c_int64)),
    "antiphon_set_rope": (c_int, (c_void_p, c_int64, c_void_p, c_int64, c_int64, c_float)),
    "antiphon_block_bytes": (c_int64, (c_void_p,)),
    "antiphon_weight_bytes": (c_int64, (c_void_p,)),
    "antiphon_prompt_tokens": (c_int64, (c_void_p,)),
    "antiphon_reserve": (c_int64, (c_void_p, c_int64, c_int64)),
    "antiphon_launch": (c_int, (c_void_p, POINTER(Step))),
    "antiphon_collect": (c_int, (c_void_p,)),
    "antiphon_multiply": (
        c_int,
        (c_void_p, c_int64, c_char_p, c_int64, c_void_p, c_int64, c_int64, c_void_p, c_int64),
    ),
}


class NativeError(RuntimeError):
    """A call into the library failed: a defect of this program, or no memory."""


class Library:
    """A loaded library. Raises OSError where it cannot be loaded."""

    def __init__(self, path: Path) -> None:
        self.name = path.stem
        """Instruction set and hash of source and flags; see `compile.library_name`."""
        self._library = ctypes.CDLL(str(path))
        for name, (result, arguments) in _SIGNATURES.items():
            try:
                function = getattr(self._library, name)
            except AttributeError as error:
                raise OSError(f"{path} lacks {name}") from error
            function.restype, function.argtypes = result, arguments

    def usable(self) -> bool:
        """Whether the system lets this process use the processor's instructions."""
        return bool(self._library.antiphon_usable())

    def new(self, spec: Spec) -> "NativeModel":
        """A model without weights."""
        handle = self._library.antiphon_new(ctypes.byref(spec))
        if not handle:
            raise NativeError(self.error())
        return NativeModel(self, handle)

    def call(self, name: str, *arguments: Any) -> int:
        """A function by its name without the prefix."""
        return getattr(self._library, f"antiphon_{name}")(*arguments)

    def check(self, name: str, *arguments: Any) -> None:
        """The same for one that returns 0. Raises `NativeError`."""
        if self.call(name, *arguments):
            raise NativeError(f"{name}: {self.error()}")

    def error(self) -> str:
        """What the last failure of this thread was."""
        return self._library.antiphon_error().decode()


class NativeModel:
    """A model in the library. Addresses are those of the memory's first element; 0 for none."""

    def __init__(self, library: Library, handle: int) -> None:
        self._library, self._handle = library, handle

    def set_matrix(self, layer: int, name: str, expert: int, address: int, shape: tuple[int, int], bias: int) -> None:
        """Packs and copies a weight [out, in] with its float32 bias."""
        self._library.check("set_matrix", self._handle, layer, name.encode(), expert, address, *shape, bias)

    def set_packed(self, layer: int, name: str, expert: int, address: int, shape: tuple[int, int], bias: int) -> None:
        """The same from what `packed` gave for it once, in memory that stays."""
        self._library.check("set_packed", self._handle, layer, name.encode(), expert, address, *shape, bias)

    def packed(self, layer: int, name: str, expert: int) -> tuple[int, int]:
        """Address and bytes of a weight as it is packed; (0, 0) for one of 8 or 4 bits."""
        size = c_int64()
        address = self._library.call("packed", self._handle, layer, name.encode(), expert, ctypes.byref(size))
        return (address, size.value) if address else (0, 0)

    def set_quantized(
        self, layer: int, name: str, expert: int, weight: Quantized, shape: tuple[int, int], bias: int
    ) -> None:
        """Packs and copies a weight [out, in] of 8 or 4 bits with its float32 bias."""
        self._library.check(
            "set_quantized", self._handle, layer, name.encode(), expert, ctypes.byref(weight), *shape, bias
        )

    def set_vector(self, layer: int, name: str, address: int, count: int) -> None:
        """Copies float32 values."""
        self._library.check("set_vector", self._handle, layer, name.encode(), address, count)

    def set_table(self, layer: int, name: str, address: int) -> None:
        """Memory that is read, or for caches written, in place."""
        self._library.check("set_table", self._handle, layer, name.encode(), address)

    def set_window(self, layer: int, window: int) -> None:
        """Tokens that a query sees, itself included."""
        self._library.check("set_window", self._handle, layer, window)

    def set_rope(self, layer: int, address: int, pairs: int, interleaved: bool, scale: float) -> None:
        """Frequencies [pairs] float32 of a layer's rotation."""
        self._library.check("set_rope", self._handle, layer, address, pairs, interleaved, scale)

    def block_bytes(self) -> int:
        """Of one layer's keys of one block; its values have as many."""
        return self._library.call("block_bytes", self._handle)

    def weight_bytes(self) -> int:
        """Of all packed matrices."""
        return self._library.call("weight_bytes", self._handle)

    def prompt_tokens(self) -> int:
        """Of prompts that a step should have at most while others wait for it: more hardly make it faster a token."""
        return self._library.call("prompt_tokens", self._handle)

    def reserve(self, tokens: int, logits: int) -> int:
        """Makes room for steps of so many tokens and logits; the most bytes that it can take."""
        size = self._library.call("reserve", self._handle, tokens, logits)
        if size < 0:
            raise NativeError(f"reserve: {self._library.error()}")
        return size

    def launch(self, step: Step) -> None:
        """Puts a step behind those that are under way. The memory that it names must live until it is collected."""
        self._library.check("launch", self._handle, ctypes.byref(step))

    def collect(self) -> None:
        """Waits for the oldest step under way; other Python threads run meanwhile."""
        self._library.check("collect", self._handle)

    def step(self, step: Step) -> None:
        """Computes a step while none is under way."""
        self.launch(step)
        self.collect()

    def multiply(self, layer: int, name: str, expert: int, x: tuple[int, int], rows: int, y: tuple[int, int]) -> None:
        """A matrix' product with rows, x and y being (address, stride in elements); see `antiphon_multiply`."""
        self._library.check("multiply", self._handle, layer, name.encode(), expert, *x, rows, *y)

    def free(self) -> None:
        """Ends its threads and frees its memory."""
        self._library.call("free", self._handle)
        self._handle = 0
