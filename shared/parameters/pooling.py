"""Pooling: one vector for a whole sequence, computed from the hidden states of its tokens.

Used by the gateway, the engine and the offline API. `check` validates all ranges. The hidden states are those after the
model's final norm. The worker computes the vector (`antiphon.services.engine.worker.batch.pooling`).
"""

import array
import sys
from typing import Literal, get_args

import msgspec

from antiphon.shared.errors import ServiceError

PoolingKind = Literal["last", "mean", "cls"]
"""Which hidden states make up the vector: the last token's, the mean of all tokens', or the first token's."""
POOLING_KINDS: tuple[PoolingKind, ...] = get_args(PoolingKind)
_SWAP = sys.byteorder == "big"


class PoolingParams(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The parameters of a pooling sequence."""

    kind: PoolingKind | None = None
    """None: the model's own kind, see `EngineFacts.pooling_kind`."""
    normalize: bool = True
    """Whether the vector is scaled to length one."""
    dimensions: int | None = None
    """Number of leading components to keep; the vector is scaled afterwards. None: all."""
    classify: bool = False
    """Whether the vector is the output of the model's classification head, one number for each label. `kind`,
    `normalize` and `dimensions` then have no effect.
    """
    activate: bool = True
    """Whether the model's activation function (softmax, for example) is applied to these numbers."""
    num_first_tokens: int = 0
    """For a pair of texts with token type ids: number of tokens of the first text, with the special tokens around it.
    0: a single text, or a tokenizer without token type ids.
    """


def check(params: PoolingParams, embedding_size: int, num_labels: int = 0) -> None:
    """Raises ServiceError if the model cannot compute such a vector.

    `embedding_size`: number of components of the model's vectors; 0 if its engine computes none. `num_labels`: number
    of labels of its classification head; 0 if it has none.
    """
    if params.classify:
        if not num_labels:
            message = "This model classifies nothing: it has no classification head. It gives embeddings."
            raise ServiceError("unsupported_parameter", message, param="model")
        return
    if num_labels:
        message = "This model gives no embeddings: it has a classification head. Send texts to /classify"
        message += " or, as pairs, to /v1/score or /v1/rerank." if num_labels == 1 else "."
        raise ServiceError("unsupported_parameter", message, param="model")
    if not embedding_size:
        message = "This model gives no embeddings: its engine runs it in a way that does not expose hidden states."
        raise ServiceError("unsupported_parameter", message, param="model")
    if params.dimensions is not None and not 1 <= params.dimensions <= embedding_size:
        message = f"'dimensions' must be between 1 and {embedding_size}, the size of this model's embeddings."
        raise ServiceError("invalid_value", message, param="dimensions")


def generates_nothing(num_labels: int) -> ServiceError:
    """Returns the error for a generation request to a model that cannot generate; it names the supported tasks."""
    if not num_labels:
        can = "it gives embeddings (/v1/embeddings, /v1/score, /v1/rerank)"
    elif num_labels == 1:
        can = "it scores texts and pairs of texts (/v1/score, /v1/rerank, /classify)"
    else:
        can = "it classifies texts (/classify)"
    return ServiceError("unsupported_parameter", f"This model generates no text: {can}.", param="model")


def unpack_vector(data: bytes) -> "array.array[float]":
    """Returns the components of a vector in its wire form, little-endian float32.

    Raises ValueError for other lengths.
    """
    vector = array.array("f", data)
    if _SWAP:
        vector.byteswap()
    return vector
