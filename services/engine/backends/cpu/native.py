"""ctypes bindings of the C++ library, one to one with `source/abi.h`.

The caller keeps the memory alive that it passes by address. Called by the CPU worker.
"""

import ctypes
import weakref
from collections.abc import Sequence
from ctypes import POINTER, c_char_p, c_float, c_int, c_int64, c_void_p
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    # This module is also imported where container images are built, without torch.
    from antiphon.services.engine.quantization.weight import QuantizedWeight, WeightKind


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
    "expert_scoring",
    "expert_groups",
    "chosen_groups",
    "cache",
    "lora_slots",
    "lora_rank",
    "best_of_group",
    "expert_latent",
    "latent_rank",
    "latent_nope",
    "latent_value",
    "query_rank",
    "mixer",
    "conv_kernel",
    "mixed_width",
    "mixer_width",
    "mix_key_heads",
    "mix_value_heads",
    "mix_key_dim",
    "mix_value_dim",
    "num_gates",
    "gate_kind",
    "value_norm",
    "group",
    "input_size",
    "input_rows",
    "experts_beside",
    "num_draft_layers",
    "query_growth_length",
    "query_growth_first",
    "query_growth_unrotated",
    "chunked_windows",
    "weighted_inputs",
    "attends_beside",
    "mix_rank",
    "mix_norm_kind",
    "num_streams",
    "side_rank",
    "cuts_gates",
)
_SPEC_FLOATS = (
    "norm_eps",
    "query_scale",
    "attention_softcap",
    "logits_softcap",
    "logits_scale",
    "embedding_scale",
    "expert_scale",
    "latent_eps",
    "query_growth_rate",
    "mix_eps",
    "step_least",
    "step_most",
    "input_scale",
    "attended_scale",
    "mlp_gate_scale",
    "mlp_scale",
    "mix_gate_scale",
    "step_scale",
)
_STEP_INTEGERS = ("num_tokens", "num_sequences", "num_logits", "num_rows", "table_width", "num_spans", "keeps")
_STEP_POINTERS = (
    "ids",
    "positions",
    "spatial",
    "query_start_loc",
    "block_tables",
    "logit_tokens",
    "logit_rows",
    "logits",
    "best",
    "best_logit",
    "log_total",
    "spans",
    "sums",
    "lora",
    "state_sources",
    "state_starts",
    "state_ends",
    "state_slots",
    "embeddings",
    "sources",
)


class Spec(ctypes.Structure):
    """The C structure `antiphon_Spec`."""

    _fields_ = [(name, c_int64) for name in _SPEC_INTEGERS] + [(name, c_float) for name in _SPEC_FLOATS]


class Step(ctypes.Structure):
    """The C structure `antiphon_Step`."""

    _fields_ = [(name, c_int64) for name in _STEP_INTEGERS] + [(name, c_void_p) for name in _STEP_POINTERS]


class Quantized(ctypes.Structure):
    """The C structure `antiphon_Quantized`."""

    _fields_ = [(name, c_int64) for name in ("kind", "group", "two_a_byte", "has_sign", "columns")] + [
        (name, c_void_p) for name in ("weight", "scales", "zeros", "levels", "order")
    ]


_SHORT = ("antiphon_launch", "antiphon_error")
"""Functions that return at once. They keep the interpreter's lock: a launch that gave it up would have to wait until
the event loop has sent the tokens of the step before."""
NATIVE_KINDS: "tuple[WeightKind, ...]" = ("int8", "int8_dynamic", "int4", "int4_dynamic")
"""The kinds of quantized weights that the library multiplies, in the order of its enumeration."""


def native_weight(weight: "QuantizedWeight") -> Quantized:
    """Returns a weight as the library takes it; valid while the weight lives."""
    parts = {"weight": weight.values, "scales": weight.scales, "zeros": weight.zeros, "levels": weight.levels}
    address = parts | {"order": weight.order}
    assert all(part is None or part.is_contiguous() for part in address.values())
    return Quantized(
        kind=NATIVE_KINDS.index(weight.kind),
        group=weight.group_size,
        two_a_byte=weight.two_a_byte,
        has_sign=weight.has_sign,
        columns=weight.num_columns,
        **{name: 0 if part is None else part.data_ptr() for name, part in address.items()},
    )


class Lora(ctypes.Structure):
    """The C structure `antiphon_Lora`."""

    _fields_ = [("rank", c_int64)] + [(name, c_void_p) for name in ("a", "b", "ranges")]


_SIGNATURES: dict[str, tuple[Any, Sequence[Any]]] = {
    "antiphon_error": (c_char_p, ()),
    "antiphon_usable": (c_int, ()),
    "antiphon_new": (c_void_p, (POINTER(Spec),)),
    "antiphon_free": (None, (c_void_p,)),
    "antiphon_set_matrix": (c_int, (c_void_p, c_int64, c_char_p, c_int64, c_void_p, c_int64, c_int64, c_void_p)),
    "antiphon_set_packed": (
        c_int,
        (c_void_p, c_int64, c_char_p, c_int64, c_void_p, c_int64, c_int64, c_int64, c_void_p),
    ),
    "antiphon_packed": (c_void_p, (c_void_p, c_int64, c_char_p, c_int64, POINTER(c_int64))),
    "antiphon_set_quantized": (
        c_int,
        (c_void_p, c_int64, c_char_p, c_int64, POINTER(Quantized), c_int64, c_int64, c_void_p),
    ),
    "antiphon_set_lora": (c_int, (c_void_p, c_int64, c_int64, c_char_p, POINTER(Lora))),
    "antiphon_set_vector": (c_int, (c_void_p, c_int64, c_char_p, c_void_p, c_int64)),
    "antiphon_set_table": (c_int, (c_void_p, c_int64, c_char_p, c_void_p)),
    "antiphon_set_heads": (c_int, (c_void_p, c_int64, c_int64, c_int64, c_int64, c_int64)),
    "antiphon_set_window": (c_int, (c_void_p, c_int64, c_int64, c_int64)),
    "antiphon_set_rope": (c_int, (c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_int64, c_float)),
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
    "antiphon_copy_block": (None, (c_void_p, c_int64, c_int64, c_void_p, c_int, c_void_p)),
}


class NativeError(RuntimeError):
    """A call into the library failed, because of a bug in this program or a lack of memory."""


class Library:
    """A loaded library. Raises OSError if it cannot be loaded or lacks a function."""

    def __init__(self, path: Path) -> None:
        self.name = path.stem
        """Instruction set and hash of source and flags; see `compile.library_name`."""
        ordinary, short = ctypes.CDLL(str(path)), ctypes.PyDLL(str(path))
        self._functions: dict[str, Any] = {}
        for name, (result, arguments) in _SIGNATURES.items():
            try:
                function = getattr(short if name in _SHORT else ordinary, name)
            except AttributeError as error:
                raise OSError(f"{path} lacks {name}") from error
            function.restype, function.argtypes = result, arguments
            self._functions[name.removeprefix("antiphon_")] = function

    def usable(self) -> bool:
        """Whether the operating system lets this process use the instructions that the library was compiled for."""
        return bool(self.call("usable"))

    def new(self, spec: Spec) -> "NativeModel":
        """Returns a model without weights. Raises `NativeError`."""
        handle = self.call("new", ctypes.byref(spec))
        if not handle:
            raise NativeError(self.error())
        return NativeModel(self, handle)

    def copy_block(self, pieces: int, count: int, piece_bytes: int, whole: int, to_pieces: bool, sums: int) -> None:
        """Copies between pieces and contiguous memory, and sums what it copies; see `antiphon_copy_block`.

        Other Python threads run meanwhile.
        """
        self.call("copy_block", pieces, count, piece_bytes, whole, to_pieces, sums)

    def call(self, name: str, *arguments: Any) -> int:
        """Calls a function, named without the prefix `antiphon_`, and returns its result."""
        return self._functions[name](*arguments)

    def check(self, name: str, *arguments: Any) -> None:
        """Calls a function that returns 0 on success. Raises `NativeError` if it returns anything else."""
        if self.call(name, *arguments):
            raise NativeError(f"{name}: {self.error()}")

    def error(self) -> str:
        """Returns the message of the last failed call on this thread."""
        return self._functions["error"]().decode()


class NativeModel:
    """A model in the library. An address is that of an array's first element; 0 means that there is no array.

    The library's memory and threads end with `free`, or with this object.
    """

    def __init__(self, library: Library, handle: int) -> None:
        self._library, self._handle = library, handle
        self._free = weakref.finalize(self, library.call, "free", handle)
        self._free.atexit = False  # when the process ends, the system frees its memory

    def set_matrix(self, layer: int, name: str, expert: int, address: int, shape: tuple[int, int], bias: int) -> None:
        """Copies a weight [out, in] into the library's layout, and its float32 bias (address 0: none)."""
        self._library.check("set_matrix", self._handle, layer, name.encode(), expert, address, *shape, bias)

    def set_packed(
        self,
        layer: int,
        name: str,
        expert: int,
        address: int,
        shape: tuple[int, int],
        bias: int,
        quantized_bytes: int = 0,
    ) -> None:
        """Sets a weight [out, in] from its packed form (see `packed`), which is read in place and must stay valid.

        `quantized_bytes`: size of the packed form of a weight of 8 or 4 bits; 0 for other weights.
        """
        self._library.check(
            "set_packed", self._handle, layer, name.encode(), expert, address, quantized_bytes, *shape, bias
        )

    def packed(self, layer: int, name: str, expert: int) -> tuple[int, int]:
        """Returns address and size in bytes of a weight's packed form."""
        size = c_int64()
        address = self._library.call("packed", self._handle, layer, name.encode(), expert, ctypes.byref(size))
        return address, size.value

    def set_quantized(
        self, layer: int, name: str, expert: int, weight: Quantized, shape: tuple[int, int], bias: int
    ) -> None:
        """Packs and copies a weight [out, in] of 8 or 4 bits with its float32 bias."""
        self._library.check(
            "set_quantized", self._handle, layer, name.encode(), expert, ctypes.byref(weight), *shape, bias
        )

    def set_lora(self, slot: int, layer: int, name: str, delta: Lora) -> None:
        """Sets the delta of a slot's adapter for a matrix. Its memory is read in place and must stay valid.

        No step in flight may have tokens with this slot.
        """
        self._library.check("set_lora", self._handle, slot, layer, name.encode(), ctypes.byref(delta))

    def set_vector(self, layer: int, name: str, address: int, count: int) -> None:
        """Copies a vector of float32 values."""
        self._library.check("set_vector", self._handle, layer, name.encode(), address, count)

    def set_table(self, layer: int, name: str, address: int) -> None:
        """Sets a table or a KV cache, which the library reads, and in the case of a cache writes, in place."""
        self._library.check("set_table", self._handle, layer, name.encode(), address)

    def set_heads(self, layer: int, kv_heads: int, head_dim: int, stride: int, borrows: bool) -> None:
        """Sets a layer's key heads, and the numbers from one block of its cache to the next.

        `borrows`: whether it reads the keys and values of an earlier layer.
        """
        self._library.check("set_heads", self._handle, layer, kv_heads, head_dim, stride, borrows)

    def set_window(self, layer: int, window: int, group: int) -> None:
        """Sets a layer's sliding window, and the group of block tables that has the layer's blocks.

        The window is the number of tokens that a query sees, itself included.
        """
        self._library.check("set_window", self._handle, layer, window, group)

    def set_rope(self, layer: int, address: int, axes: int, pairs: int, interleaved: bool, scale: float) -> None:
        """Sets a layer's rotary frequencies [pairs] float32, and the scale of the cosines and sines.

        `axes`: address of [pairs] int64, the position by which each turns where tokens have three; 0: there is one.
        """
        self._library.check("set_rope", self._handle, layer, address, axes, pairs, interleaved, scale)

    def block_bytes(self) -> int:
        """Returns the bytes of one layer's keys in one KV block; the values, if there are any, take as many."""
        return self._library.call("block_bytes", self._handle)

    def weight_bytes(self) -> int:
        """Returns the bytes of all packed matrices."""
        return self._library.call("weight_bytes", self._handle)

    def prompt_tokens(self) -> int:
        """Returns how many prompt tokens a step should have at most while other sequences wait for it.

        More prompt tokens would hardly reduce the time per token.
        """
        return self._library.call("prompt_tokens", self._handle)

    def reserve(self, tokens: int, logits: int) -> int:
        """Allocates memory for steps with up to this many tokens and logits. Returns an upper bound of its bytes."""
        size = self._library.call("reserve", self._handle, tokens, logits)
        if size < 0:
            raise NativeError(f"reserve: {self._library.error()}")
        return size

    def launch(self, step: Step) -> None:
        """Queues a step after those in flight. The memory that it points to must live until the step is collected."""
        self._library.check("launch", self._handle, ctypes.byref(step))

    def collect(self) -> None:
        """Waits for the oldest step in flight; other Python threads run meanwhile."""
        self._library.check("collect", self._handle)

    def step(self, step: Step) -> None:
        """Computes one step and waits for it. No other step may be in flight."""
        self.launch(step)
        self.collect()

    def multiply(self, layer: int, name: str, expert: int, x: tuple[int, int], rows: int, y: tuple[int, int]) -> None:
        """Multiplies rows by a matrix. x and y are (address, stride in elements); see `antiphon_multiply`."""
        self._library.check("multiply", self._handle, layer, name.encode(), expert, *x, rows, *y)

    def free(self) -> None:
        """Ends the model's threads and frees its memory."""
        self._free()
        self._handle = 0
