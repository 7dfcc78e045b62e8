"""The floor of a load: the shortest time that a machine's read bandwidth and matrix multiplication rate allow.

The module computes seconds from a decoder's description (config.json) and the two rates, which
`bench.limits_of_machine.probe` measures. Norms, biases, activations, sampling, writing the KV cache and everything
outside the model are ignored. This only makes the floor lower, so that no system can be faster than the floor. Used by
`bench.harness.measure`.

    a step          max(bytes / read bandwidth, operations / GEMM rate)
    bytes           every matrix except the embedding once; keys and values of every attended token, for a shared prefix
                    only once for all sequences; recurrent states
    operations      2 for each weight and token; 4 x query width for each token and each token that it attends to; the
                    output projection only for tokens that are sampled
    a load          waves of `clients` requests: one step for their prompts, then a step for each further token
"""

import math
from dataclasses import dataclass

from antiphon.services.engine.models.description import DecoderDescription
from bench.harness.loads import Load

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class Limits:
    """Upper limits of a machine: bytes read and operations, each per second."""

    read_bytes: float
    operations: float


@dataclass(frozen=True, slots=True)
class Work:
    """The bytes that one step has to read and the operations that it has to compute."""

    bytes: int
    operations: int

    def seconds(self, limits: Limits) -> float:
        """Returns the shortest time of the step in seconds."""
        return max(self.bytes / limits.read_bytes, self.operations / limits.operations)


@dataclass(frozen=True, slots=True)
class Floor:
    """The shortest time of a load in seconds, for the prompts and for the steps after them."""

    prompts_s: float
    decode_s: float

    @property
    def total_s(self) -> float:
        """The sum of both times."""
        return self.prompts_s + self.decode_s


def layer_weights(d: DecoderDescription) -> int:
    """Returns the number of weights that one token uses in all layers.

    For a mixture of experts, these are the weights of the token's own experts and of the router.
    """
    return sum(_mixer_weights(d, layer) + _mlp_weights(d, layer) for layer in range(d.num_layers))


def head_weights(d: DecoderDescription) -> int:
    """Returns the number of weights of the output projection."""
    return d.vocab_size * d.hidden_size


def weight_bytes(d: DecoderDescription) -> int:
    """Returns the bytes of weights that a step reads in which a token is sampled."""
    return (layer_weights(d) + head_weights(d)) * DTYPE_BYTES[d.dtype]


def kv_bytes(d: DecoderDescription, context: int) -> int:
    """Returns the bytes of keys and values that one token reads in all layers.

    `context` is the number of tokens up to and including this one; a sliding window may hide some of them.
    """
    return 2 * d.kv_size * DTYPE_BYTES[d.dtype] * _seen(d, context)


def token_operations(d: DecoderDescription, context: int) -> int:
    """Returns the number of floating-point operations for one token in all layers, without the output head."""
    return 2 * layer_weights(d) + 4 * d.q_size * _seen(d, context)


def prompt_step(d: DecoderDescription, sequences: int, prompt: int, cached: int = 0) -> Work:
    """Returns the work of the step that computes `sequences` prompts of `prompt` tokens, each after `cached` tokens."""
    tokens = sum(token_operations(d, cached + position + 1) for position in range(prompt))
    operations = sequences * (tokens + 2 * head_weights(d))
    return Work(weight_bytes(d) + kv_bytes(d, cached), operations)


def decode_step(d: DecoderDescription, sequences: int, context: int, shared: int = 0) -> Work:
    """Returns the work of a decode step of `sequences` requests with `context` tokens each.

    The first `shared` of these tokens are the same in all requests.
    """
    own = kv_bytes(d, context) - kv_bytes(d, shared)
    operations = sequences * (token_operations(d, context) + 2 * head_weights(d))
    each = max(own, 0) + d.state_bytes
    return Work(weight_bytes(d) + kv_bytes(d, shared) + sequences * each, operations)


def floor(d: DecoderDescription, load: Load, limits: Limits) -> Floor:
    """Returns the shortest time of a load whose shared prefix is already in the prefix cache."""
    prompts, decode = ([work.seconds(limits) for work in steps] for steps in (_prompt_steps(d, load), _steps(d, load)))
    return Floor(math.fsum(prompts), math.fsum(decode))


def _waves(load: Load) -> list[int]:
    """Returns the number of requests in each wave."""
    whole, rest = divmod(load.requests, load.clients)
    return [load.clients] * whole + [rest] * (rest > 0)


def _prompt_steps(d: DecoderDescription, load: Load) -> list[Work]:
    return [prompt_step(d, sequences, load.prompt, load.shared) for sequences in _waves(load)]


def _steps(d: DecoderDescription, load: Load) -> list[Work]:
    """Returns the work of the steps after the prompts."""
    contexts = range(load.prompt_length + 1, load.prompt_length + load.output)
    return [decode_step(d, sequences, c, load.shared) for sequences in _waves(load) for c in contexts]


def _seen(d: DecoderDescription, context: int) -> int:
    """Returns the number of tokens that a token attends to, added up over the layers; a sliding window limits it."""
    return sum(min(context, d.sliding_windows[layer] or context) for layer in d.attention_layers)


def _mixer_weights(d: DecoderDescription, layer: int) -> int:
    """Returns the number of weights of a layer's attention, or of what it has in its place."""
    if d.recurrent is not None and d.is_recurrent(layer):
        return d.hidden_size * (sum(d.recurrent.in_widths) + d.recurrent.num_gates + d.recurrent.width)
    return d.hidden_size * (2 * d.q_size + 2 * d.kv_size + d.attention_gate * d.gate_size)


def _mlp_weights(d: DecoderDescription, layer: int) -> int:
    matrices = 3 if d.gated_mlp else 2
    if d.experts is None or not d.has_experts(layer):
        return matrices * d.hidden_size * d.intermediate_size
    chosen = d.experts.num_per_token * d.experts.intermediate_size + d.experts.shared_intermediate_size
    return d.hidden_size * (matrices * chosen + d.experts.num_experts)
