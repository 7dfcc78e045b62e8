"""Messages to and from the image services of a model, and from the holder of a picture's file. See the package.

A file is kept by the gateway that serves the request, as long as the request runs. An image service reads the file from
there when it does not have the picture's embeddings, and an engine reads the embeddings from an image service. Files
and embeddings are read in parts, so that each fits into a bus message.
"""

from shared.messages.base import Message, Part


class PictureFile(Part, frozen=True, array_like=True):
    """The file of a picture. `digest`: its SHA-256; `size`: bytes; `source`: subject of the gateway that has it."""

    digest: bytes
    size: int
    source: str


class EncodePicture(Message, frozen=True, array_like=True, tag=True):
    """Has the embeddings of a picture computed, unless the image service has them. Answered by `PictureEncoded`."""

    model: str
    file: PictureFile


class PictureEncoded(Message, frozen=True, array_like=True, tag=True):
    """The reply to `EncodePicture`: the picture has `rows` times `columns` embeddings, row by row.

    The embeddings are `num_bytes` bytes: numbers of the type `dtype`, [rows * columns, width], see `PlacedPicture`. The
    replica `holder_id` has them, and may forget them.
    """

    rows: int
    columns: int
    key: bytes
    """Names the embeddings: equal keys mean equal embeddings."""
    num_bytes: int
    dtype: str
    token_id: int
    """The token that stands for a picture in the text of a prompt."""
    holder_id: str
    holder_instance_id: str
    place: str = ""
    """What a prompt has as text in the place of a picture, if that is not the token; see `PictureTokens.text`."""
    text: str = ""
    layout: bytes = b""
    """The picture as packed token ids, if other tokens are between those of its embeddings (`PictureTokens.layout`)."""


class ReadPicture(Message, frozen=True, array_like=True, tag=True):
    """Asks a gateway for the part of a file that begins at `offset`, bytes. Answered by `PicturePart`."""

    digest: bytes
    offset: int


class ReadEmbeddings(Message, frozen=True, array_like=True, tag=True):
    """Asks an image service for the part of embeddings that begins at `offset`, bytes. Answered by `PicturePart`."""

    key: bytes
    offset: int


class PicturePart(Message, frozen=True, array_like=True, tag=True):
    """A part of a file or of embeddings: at most `limits.IMAGE_PART_BYTES` from the offset on, up to the end."""

    data: bytes


class PromptPicture(Part, frozen=True, array_like=True):
    """A picture in a prompt: where its tokens begin, what the reply to `EncodePicture` says, and the picture's file."""

    start: int
    encoded: PictureEncoded
    file: PictureFile


class PictureTokens(Part, frozen=True, array_like=True):
    """What a tokenizer has to know of a picture: the token that stands for it in the text, and how often it counts."""

    token_id: int
    num_tokens: int
    key: bytes
    place: str = ""
    text: str = ""
    """What replaces the `place` of the picture in the text of a prompt, with the token once; empty: the text stays."""
    layout: bytes = b""
    """The packed token ids that the token becomes, which occurs among them; empty: `num_tokens` times the token."""
