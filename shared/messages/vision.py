"""Messages to and from the image services of a model, and from the gateway that has an image's file. See the package.

The gateway that serves a request keeps its image files as long as the request runs. An image service reads a file from
the gateway if it does not have the image's embeddings; an engine reads the embeddings from an image service. Files and
embeddings are read in parts, so that each fits into a bus message.
"""

from antiphon.shared.messages.base import Message, Part


class ImageFile(Part, frozen=True, array_like=True):
    """The file of an image. `digest`: its SHA-256; `size`: bytes; `source`: subject of the gateway that has it."""

    digest: bytes
    size: int
    source: str


class EncodeImage(Message, frozen=True, array_like=True, tag=True):
    """Makes an image service compute an image's embeddings unless it already has them. Answered by `ImageEncoded`."""

    model: str
    file: ImageFile
    client: str = ""
    """The client whose request has the image. Clients take turns."""


class ImageEncoded(Message, frozen=True, array_like=True, tag=True, kw_only=True):
    """The reply to `EncodeImage`: the image has `rows` times `columns` embeddings, row by row.

    The embeddings are `num_bytes` bytes: numbers of the type `dtype`, [rows * columns, width], see `PlacedImage`. The
    replica `holder_id` has them, and may evict them.
    """

    rows: int
    columns: int
    key: bytes
    """Names the embeddings: equal keys mean equal embeddings."""
    num_bytes: int
    dtype: str
    token_id: int
    """The image token in the text of a prompt."""
    holder_id: str
    holder_instance_id: str
    place: str = ""
    """Placeholder text of an image in a prompt, if it is not the image token; see `ImageTokens.text`."""
    text: str = ""
    layout: bytes = b""
    """The image's packed token ids, if there are other tokens between those with embeddings (`ImageTokens.layout`).
    """
    num_pixels: int = 0
    """Pixels of the decoded image."""


class ReadImage(Message, frozen=True, array_like=True, tag=True):
    """Asks a gateway for the part of a file that begins at `offset`, bytes. Answered by `ImagePart`."""

    digest: bytes
    offset: int


class ReadEmbeddings(Message, frozen=True, array_like=True, tag=True):
    """Asks an image service for the part of embeddings that begins at `offset`, bytes. Answered by `ImagePart`."""

    key: bytes
    offset: int


class ImagePart(Message, frozen=True, array_like=True, tag=True):
    """A part of a file or of embeddings: at most `limits.IMAGE_PART_BYTES` from the offset on, up to the end."""

    data: bytes


class PromptImage(Part, frozen=True, array_like=True):
    """An image in a prompt: the index of its first token, the reply to `EncodeImage`, and the image's file."""

    start: int
    encoded: ImageEncoded
    file: ImageFile


class ImageTokens(Part, frozen=True, array_like=True, kw_only=True):
    """The description of an image for a tokenizer: the image token in the text, and the number of its repetitions."""

    token_id: int
    num_tokens: int
    key: bytes
    place: str = ""
    text: str = ""
    """Text that replaces the image's placeholder `place` in a prompt and contains the image token once; empty: no
    replacement.
    """
    layout: bytes = b""
    """The packed token ids that replace the image token, and contain it; empty: `num_tokens` times the token."""
