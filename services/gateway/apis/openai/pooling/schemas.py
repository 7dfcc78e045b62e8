"""The bodies of requests for embeddings, labels, scores and reranking. None means the default.

`requests` checks the values.
"""

import msgspec

from antiphon.services.gateway.apis.openai.bodies.request_fields import OPENAI


class TextFields(msgspec.Struct, kw_only=True):
    """Fields that the bodies have in common. `priority` and `service_tier` are extensions of this server."""

    model: str | None = None
    add_special_tokens: bool | None = None
    priority: int | None = None
    service_tier: str | None = None
    """As at /v1/chat/completions."""
    truncate_prompt_tokens: int | None = None
    """Number of first tokens of each text, or pair of texts, that are kept, special tokens included; -1: as many as
    fit into the context. None: longer texts than the context are refused."""


class PoolingFields(TextFields, kw_only=True):
    """Fields of the bodies whose answers may be made of vectors. `pooling` is an extension of this server."""

    pooling: str | None = None
    """`last`, `mean` or `cls`, see `antiphon.shared.parameters.pooling`. The default depends on the model."""


class ClassifyBody(TextFields, kw_only=True):
    """Body of `/classify`: one or several texts for a model with a classification head."""

    input: str | list[str | int | list[int]] | None = None
    """A text, a list of texts, a list of token ids, or a list of such lists."""
    use_activation: bool | None = None
    """Whether the model's activation function is applied to the head's outputs (default: true)."""


class EmbeddingBody(PoolingFields, kw_only=True):
    """Body of `/v1/embeddings`: one or several inputs, as text or token ids."""

    input: str | list[str | int | list[int]] | None = None
    """A text, a list of texts, a list of token ids, or a list of such lists."""
    encoding_format: str | None = None
    """`float` (default) or `base64`."""
    embed_dtype: str | None = None
    """Type of the numbers with `base64`: `float32` (default) or `float16`."""
    endianness: str | None = None
    """Order of their bytes: `little` (default), `big`, or `native`, that of the server."""
    dimensions: int | None = None
    """Number of leading components to keep. The shortened vector is scaled to length one again."""
    normalize: bool | None = None
    """Whether vectors are scaled to length one (default)."""


class PoolingBody(EmbeddingBody, kw_only=True):
    """Body of `/pooling`."""

    task: str | None = None
    """`embed`, the default: a vector for each input."""


class ScoreBody(PoolingFields, kw_only=True):
    """Body of `/v1/score`: pairs of texts. One `text_1` is paired with each `text_2`; lists are paired item by item."""

    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    use_activation: bool | None = None
    """Of a model with a classification head: see `ClassifyBody`."""


class Document(msgspec.Struct, kw_only=True):
    """A document given as an object. Its other members are ignored; only `text` is returned."""

    text: str


class RerankBody(PoolingFields, kw_only=True):
    """Body of `/v1/rerank`: a query, and documents to order by how well they match it."""

    query: str | None = None
    documents: list[str | Document] | None = None
    top_n: int | None = None
    """Number of results; the default is all documents."""
    texts: list[str] | None = None
    """The documents in TEI's form of the request, whose answer is a list of indices and scores."""
    return_text: bool | None = None
    """TEI's `return_documents` (default: false)."""
    raw_scores: bool | None = None
    """TEI's opposite of `use_activation`."""
    truncate: bool | None = None
    """TEI's `truncate_prompt_tokens` -1."""
    return_documents: bool | None = None
    """Whether results have the documents' texts (default)."""
    use_activation: bool | None = None
    """Of a model with a classification head: see `ClassifyBody`."""


CLASSIFY_DECODER = msgspec.json.Decoder(ClassifyBody)
EMBEDDING_DECODER = msgspec.json.Decoder(EmbeddingBody)
POOLING_DECODER = msgspec.json.Decoder(PoolingBody)
SCORE_DECODER = msgspec.json.Decoder(ScoreBody)
RERANK_DECODER = msgspec.json.Decoder(RerankBody)
_SIDES = {"queries": "text_1", "data_1": "text_1", "documents": "text_2", "items": "text_2", "data_2": "text_2"}
SCORE_RULES = OPENAI._replace(mapped={**OPENAI.mapped, **_SIDES})
"""The rules of `/v1/score`, with vLLM's further names of the two sides."""
