"""Computes scores and labels from vectors, and the bodies of the responses of the pooling routes. Pure.

Functions that work on many vectors are generators that yield after each vector, so that the caller can let other
requests run in between.
"""

import base64
import math
import struct
from collections.abc import Iterator, Sequence
from operator import mul
from typing import Any, Literal

import msgspec

from antiphon.shared.parameters.pooling import unpack_vector

Prefix = Literal["classify", "embd", "pool", "score", "rerank"]
_AS_SENT = "<f"
"""The `struct` code of vectors in messages."""
_HALF_MAX = 65520.0
"""From here on a number is rounded to infinity in 16 bits."""
_encode = msgspec.json.Encoder().encode


def embedding_items(
    vectors: Sequence[bytes], encoding: str, kind: str = "embedding", field: str = "embedding"
) -> Iterator[bytes]:
    """Yields the JSON of each item of `data`. `encoding`: `float`, or base64 of numbers with this `struct` code.

    `kind`: the item's `object`; `field`: the member that has the vector.
    """
    for index, vector in enumerate(vectors):
        shown = unpack_vector(vector).tolist() if encoding == "float" else _base64(vector, encoding)
        yield _encode({"object": kind, "index": index, field: shown})


def _base64(vector: bytes, encoding: str) -> str:
    if encoding != _AS_SENT:
        numbers = unpack_vector(vector).tolist()
        if encoding.endswith("e"):
            numbers = [one if abs(one) < _HALF_MAX else math.copysign(math.inf, one) for one in numbers]
        vector = struct.pack(f"{encoding[0]}{len(numbers)}{encoding[1]}", *numbers)
    return base64.b64encode(vector).decode()


def embeddings(head: dict[str, Any], items: Sequence[bytes], num_tokens: int) -> bytes:
    """Returns the body of `/v1/embeddings`."""
    return _encode(head | {"object": "list", "data": list(map(msgspec.Raw, items)), "usage": _usage(num_tokens)})


def cosines(first: Sequence[bytes], second: Sequence[bytes]) -> Iterator[float]:
    """Yields the cosine of each pair of vectors of length one. A single first vector is paired with each second one."""
    ours = [unpack_vector(vector) for vector in first]
    for index, vector in enumerate(second):
        yield sum(map(mul, ours[index if len(ours) > 1 else 0], unpack_vector(vector)))


def scores(head: dict[str, Any], values: Sequence[float], num_tokens: int) -> bytes:
    """Returns the body of `/v1/score`."""
    data = [{"index": index, "object": "score", "score": value} for index, value in enumerate(values)]
    return _encode(head | {"object": "list", "data": data, "usage": _usage(num_tokens)})


def first_numbers(vectors: Sequence[bytes]) -> Iterator[float]:
    """Yields the score of each pair of texts: the output of a classification head with one label."""
    for vector in vectors:
        yield unpack_vector(vector)[0]


def label_items(vectors: Sequence[bytes], labels: Sequence[str]) -> Iterator[bytes]:
    """Yields the JSON of each item of `data` of `/classify`. `vectors` have one number for each of `labels`."""
    for index, vector in enumerate(vectors):
        numbers = unpack_vector(vector)
        best = max(range(len(numbers)), key=numbers.__getitem__)
        item = {"index": index, "label": labels[best], "probs": numbers.tolist(), "num_classes": len(numbers)}
        yield _encode(item)


def labelled(head: dict[str, Any], items: Sequence[bytes], num_tokens: int) -> bytes:
    """Returns the body of `/classify`."""
    return _encode(head | {"object": "list", "data": list(map(msgspec.Raw, items)), "usage": _usage(num_tokens)})


def ranking(
    head: dict[str, Any], values: Sequence[float], num_tokens: int, top_n: int | None, documents: Sequence[str] | None
) -> bytes:
    """Returns the body of `/v1/rerank`: the best documents first, equal ones in the order of the request.

    `documents`: texts to put into the results; None: the results have none.
    """
    order = _order(values, top_n)
    results = [
        {
            "index": index,
            **({} if documents is None else {"document": {"text": documents[index]}}),
            "relevance_score": values[index],
        }
        for index in order
    ]
    return _encode(head | {"results": results, "usage": _usage(num_tokens)})


def tei_ranking(values: Sequence[float], top_n: int | None, texts: Sequence[str] | None) -> bytes:
    """Returns the ranking in TEI's form. `texts`: those of the documents, to put into it; None: it has none."""
    return _encode(
        [
            {"index": index, "score": values[index], **({} if texts is None else {"text": texts[index]})}
            for index in _order(values, top_n)
        ]
    )


def _order(values: Sequence[float], top_n: int | None) -> list[int]:
    return sorted(range(len(values)), key=lambda index: -values[index])[:top_n]


def head(prefix: Prefix, request_id: str, created: int, model: str) -> dict[str, Any]:
    """Returns the JSON members that every response of the pooling routes begins with."""
    return {"id": f"{prefix}-{request_id}", "created": created, "model": model}


def _usage(num_tokens: int) -> dict[str, int]:
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
