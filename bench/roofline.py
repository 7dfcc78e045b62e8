"""The shortest time in which a load can be done at all: bytes and operations of a model, over what a machine allows.

Pure: from a decoder's description (config.json) and two rates of the machine to seconds. What it leaves out (norms,
biases, activations, sampling, writing the KV cache, everything around the model) only makes the floor lower, so no
system can be below it. Used by `bench.measure`; the rates come from `bench.probe`.

    a step          max(bytes / read bandwidth, operations / GEMM rate)
    bytes           every matrix once, but of the embedding; keys and values of each token that is attended to, those of
                    a shared prefix once for all
    operations      2 for each weight and token, 4 x query width for each token and token that it sees; the output
                    projection only where a token comes out
    a load          waves of `clients` requests: one step for their prompts, then a step for each further token
"""

import math
from dataclasses import dataclass

from bench.loads import Load
from services.engine.models.description import DecoderDescription

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class Limits:
    """What a machine does a second at most."""

    read_bytes: float
    operations: float


@dataclass(frozen=True, slots=True)
class Work:
    """What one step has to read and to compute."""

    bytes: int
    operations: int

    def seconds(self, limits: Limits) -> float:
        """Its shortest time."""
        return max(self.bytes / limits.read_bytes, self.operations / limits.operations)


@dataclass(frozen=True, slots=True)
class Floor:
    """The shortest time of a load, in seconds."""

    prompts_s: float
    decode_s: float

    @property
    def total_s(self) -> float:
        """Both; they follow each other."""
        return self.prompts_s + self.decode_s


def layer_weights(d: DecoderDescription) -> int:
    """Weights of the matrices of all layers that one token passes: of a mixture, its own experts and the router."""
    attention = d.hidden_size * (2 * d.q_size + 2 * d.kv_size)
    return sum(attention + _mlp_weights(d, layer) for layer in range(d.num_layers))


def head_weights(d: DecoderDescription) -> int:
    """Weights of the output projection."""
    return d.vocab_size * d.hidden_size


def weight_bytes(d: DecoderDescription) -> int:
    """Bytes of weights that a step with output reads."""
    return (layer_weights(d) + head_weights(d)) * DTYPE_BYTES[d.dtype]


def kv_bytes(d: DecoderDescription, context: int) -> int:
    """Bytes of keys and values that a token with this many tokens in sight (its own included) reads, of all layers."""
    return 2 * d.kv_size * DTYPE_BYTES[d.dtype] * _seen(d, context)


def token_operations(d: DecoderDescription, context: int) -> int:
    """Operations of one token in all layers, without the output projection."""
    return 2 * layer_weights(d) + 4 * d.q_size * _seen(d, context)


def prompt_step(d: DecoderDescription, sequences: int, prompt: int, cached: int = 0) -> Work:
    """The step that computes the prompts of `sequences` requests: `prompt` tokens each, behind `cached` ones."""
    tokens = sum(token_operations(d, cached + position + 1) for position in range(prompt))
    operations = sequences * (tokens + 2 * head_weights(d))
    return Work(weight_bytes(d) + kv_bytes(d, cached), operations)


def decode_step(d: DecoderDescription, sequences: int, context: int, shared: int = 0) -> Work:
    """A step of `sequences` requests with `context` tokens in sight each, the first `shared` of them the same ones."""
    own = kv_bytes(d, context) - kv_bytes(d, shared)
    operations = sequences * (token_operations(d, context) + 2 * head_weights(d))
    return Work(weight_bytes(d) + kv_bytes(d, shared) + sequences * max(own, 0), operations)


def floor(d: DecoderDescription, load: Load, limits: Limits) -> Floor:
    """The shortest time of a load whose shared prefix is cached already."""
    prompts, decode = ([work.seconds(limits) for work in steps] for steps in (_prompt_steps(d, load), _steps(d, load)))
    return Floor(math.fsum(prompts), math.fsum(decode))


def _waves(load: Load) -> list[int]:
    """How many requests each wave has."""
    whole, rest = divmod(load.requests, load.clients)
    return [load.clients] * whole + [rest] * (rest > 0)


def _prompt_steps(d: DecoderDescription, load: Load) -> list[Work]:
    return [prompt_step(d, sequences, load.prompt, load.shared) for sequences in _waves(load)]


def _steps(d: DecoderDescription, load: Load) -> list[Work]:
    """Those after the prompts."""
    contexts = range(load.prompt_length + 1, load.prompt_length + load.output)
    return [decode_step(d, sequences, c, load.shared) for sequences in _waves(load) for c in contexts]


def _seen(d: DecoderDescription, context: int) -> int:
    """Tokens in sight, added up over the layers: a window hides some."""
    return sum(min(context, window or context) for window in d.sliding_windows)


def _mlp_weights(d: DecoderDescription, layer: int) -> int:
    matrices = 3 if d.gated_mlp else 2
    if d.experts is None or not d.has_experts(layer):
        return matrices * d.hidden_size * d.intermediate_size
    chosen = d.experts.num_per_token * d.experts.intermediate_size + d.experts.shared_intermediate_size
    return d.hidden_size * (matrices * chosen + d.experts.num_experts)
