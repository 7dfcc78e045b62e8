"""Embeddings that are given to a step for tokens without a row of the embedding matrix.

These tokens are those of images and the virtual tokens of prompt adapters. The worker makes `GivenEmbeddings`, the
decoder applies them.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class GivenEmbeddings:
    """`tokens` [n] int64: indices of the tokens in the step, each once. `rows` [n, width]: their embeddings.

    `width` is hidden or, with embeddings for further layers (`DecoderDescription.image_layers`), hidden * (1 + layers).
    """

    tokens: Tensor
    rows: Tensor

    def placed(self, embeddings: Tensor) -> Tensor:
        """Returns the embeddings [num_tokens, hidden] of a step with the given ones in their places."""
        return embeddings.index_copy(0, self.tokens, self.rows[:, : embeddings.shape[1]])

    def added(self, layer: int, hidden: Tensor) -> Tensor:
        """Returns a layer's output [num_tokens, hidden] plus what is given for this layer."""
        width = hidden.shape[1]
        return hidden.index_add(0, self.tokens, self.rows[:, (layer + 1) * width : (layer + 2) * width])
