"""Pooling: one vector for a whole sequence, made of the hidden states of its tokens.

Used by the gateway, the engine and the offline API. `check` validates all ranges. The hidden states are those behind
the model's final norm. The worker computes the vector (`services.engine.worker.pooling`).
"""

import array
import sys
from typing import Literal, get_args

import msgspec

from shared.errors import ServiceError

PoolingKind = Literal["last", "mean", "cls"]
"""Which hidden states make up the vector: the last token's, the mean of all tokens', or the first token's."""
POOLING_KINDS: tuple[PoolingKind, ...] = get_args(PoolingKind)
_SWAP = sys.byteorder == "big"


class PoolingParams(msgspec.Struct, frozen=True, array_like=True):
    """What a pooling sequence asks for."""

    kind: PoolingKind | None = None
    """None: the model's own kind, see `EngineFacts.pooling_kind`."""
    normalize: bool = True
    """Whether the vector is scaled to length one."""
    dimensions: int | None = None
    """Number of leading components to keep; the vector is scaled afterwards. None: all."""


def check(params: PoolingParams, embedding_size: int) -> None:
    """Raises ServiceError if the model cannot give such a vector.

    `embedding_size`: number of components of the model's vectors; 0 if its engine computes none.
    """
    if not embedding_size:
        message = "This model gives no embeddings: its engine runs it in a way that does not expose hidden states."
        raise ServiceError("unsupported_parameter", message, param="model")
    if params.dimensions is not None and not 1 <= params.dimensions <= embedding_size:
        message = f"'dimensions' must be between 1 and {embedding_size}, the size of this model's embeddings."
        raise ServiceError("invalid_value", message, param="dimensions")


def unpack_vector(data: bytes) -> "array.array[float]":
    """Returns the components of a vector as it is sent: little-endian float32. Raises ValueError for other lengths."""
    vector = array.array("f", data)
    if _SWAP:
        vector.byteswap()
    return vector
