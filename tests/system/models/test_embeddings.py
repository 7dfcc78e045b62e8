"""Embeddings, scores and reranking through the whole system, against transformers' hidden states, also offline."""

import base64
import concurrent.futures
import os
import signal
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

from antiphon import LLM, PoolingParams
from tests.system.offline import FLAGS
from tests.system.served import Served, fetch, serve_tiny, until_the_end

Vectors = Callable[..., NDArray[np.float64]]
CONTEXT = 256
TEXTS = ["Once upon a time", "a cat sat on the mat", "12 + 7 = 19"]


@pytest.fixture(scope="module")
def served(model: Path) -> Iterator[Served]:
    flags = ("--dtype=float32", f"--max-model-len={CONTEXT}", "--block-size=8", "--engines=2")
    with until_the_end(serve_tiny(model, *flags)) as started:
        yield started


@pytest.fixture(scope="module")
def vectors(model: Path) -> Vectors:
    """Of texts or token ids, from the last hidden states of transformers' model."""
    from transformers import AutoModel

    hidden_states = AutoModel.from_pretrained(model, dtype=torch.float32).eval()
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))

    def compute(inputs: list[Any], kind: str = "last", dimensions: int | None = None) -> NDArray[np.float64]:
        found: list[NDArray[np.float64]] = []
        for one in inputs:
            ids = tokenizer.encode(one).ids if isinstance(one, str) else one
            with torch.inference_mode():
                hidden = hidden_states(torch.tensor([ids])).last_hidden_state[0].double().numpy()
            vector = {"last": hidden[-1], "mean": hidden.mean(0), "cls": hidden[0]}[kind][:dimensions]
            found.append(vector / np.linalg.norm(vector))
        return np.stack(found)

    return compute


def embedded(client: openai.OpenAI, inputs: Any, **fields: Any) -> NDArray[np.float64]:
    answer = client.embeddings.create(model="tiny", input=inputs, **fields)
    assert [one.index for one in answer.data] == list(range(len(answer.data)))
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 0
    return np.array([one.embedding for one in answer.data])


def test_vectors_are_those_of_transformers_in_every_form(client: openai.OpenAI, vectors: Vectors) -> None:
    expected = vectors(TEXTS)
    np.testing.assert_allclose(embedded(client, TEXTS), expected, atol=1e-4)
    np.testing.assert_allclose(embedded(client, TEXTS, encoding_format="float"), expected, atol=1e-4)
    np.testing.assert_allclose(embedded(client, TEXTS[0]), expected[:1], atol=1e-4)
    ids = [[5, 6, 7], [8, 9]]
    np.testing.assert_allclose(embedded(client, ids), vectors(ids), atol=1e-4)
    np.testing.assert_allclose(embedded(client, ids[0]), vectors(ids)[:1], atol=1e-4)
    np.testing.assert_allclose(embedded(client, TEXTS, dimensions=8), vectors(TEXTS, dimensions=8), atol=1e-4)
    for kind in ("mean", "cls"):
        found = embedded(client, TEXTS, extra_body={"pooling": kind})
        np.testing.assert_allclose(found, vectors(TEXTS, kind), atol=1e-4)


def test_base64_is_float32_in_little_endian_order(served: Served, vectors: Vectors) -> None:
    body = {"model": "tiny", "input": TEXTS[0], "encoding_format": "base64"}
    [item] = fetch(served, "POST", "/v1/embeddings", body).json["data"]
    found = array("f", base64.b64decode(item["embedding"]))
    np.testing.assert_allclose(found, vectors(TEXTS[:1])[0], atol=1e-4)


def test_a_batch_comes_back_in_order_while_text_is_generated(client: openai.OpenAI, vectors: Vectors) -> None:
    inputs = [[3 + number, *range(10, 10 + 3 * number)] for number in range(64)]
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        text = pool.submit(client.completions.create, model="tiny", prompt="Hello", max_tokens=40, temperature=0)
        np.testing.assert_allclose(embedded(client, inputs), vectors(inputs), atol=1e-4)
        assert text.result().choices[0].finish_reason in ("length", "stop")


def test_an_input_may_fill_the_context_and_not_more(client: openai.OpenAI) -> None:
    assert len(embedded(client, [[5] * CONTEXT])) == 1
    for inputs in ([[5], [5] * (CONTEXT + 1)], ["a", "b " * CONTEXT]):
        with pytest.raises(openai.BadRequestError) as error:
            embedded(client, inputs)
        assert (error.value.code, error.value.param) == ("context_length_exceeded", "input[1]")


def test_more_dimensions_than_the_model_has_are_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        embedded(client, TEXTS, dimensions=65)
    assert error.value.param == "dimensions"
    assert "between 1 and 64" in error.value.message


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
def test_scores_are_cosines(served: Served, vectors: Vectors, path: str) -> None:
    one, *others = vectors(TEXTS)
    answer = fetch(served, "POST", path, {"model": "tiny", "text_1": TEXTS[0], "text_2": TEXTS[1:]}).json
    assert [each["score"] for each in answer["data"]] == pytest.approx([one @ other for other in others], abs=1e-4)
    answer = fetch(served, "POST", path, {"model": "tiny", "text_1": TEXTS, "text_2": TEXTS}).json
    assert [each["score"] for each in answer["data"]] == pytest.approx([1.0] * 3, abs=1e-4)


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
def test_documents_are_ordered_by_their_cosine_with_the_query(served: Served, vectors: Vectors, path: str) -> None:
    query, *documents = vectors(["a cat sat on the mat", *TEXTS])
    cosines = [query @ document for document in documents]
    body = {"model": "tiny", "query": "a cat sat on the mat", "documents": [TEXTS[0], {"text": TEXTS[1]}, TEXTS[2]]}
    results = fetch(served, "POST", path, body).json["results"]
    assert [one["index"] for one in results] == sorted(range(3), key=lambda index: -cosines[index])
    assert results[0]["index"] == 1
    assert results[0]["relevance_score"] == pytest.approx(1.0, abs=1e-4)
    assert [one["document"]["text"] for one in results] == [TEXTS[one["index"]] for one in results]
    [best] = fetch(served, "POST", path, body | {"top_n": 1, "return_documents": False}).json["results"]
    assert best == {"index": 1, "relevance_score": results[0]["relevance_score"]}


def test_vectors_arrive_although_an_engine_dies(served: Served, client: openai.OpenAI, vectors: Vectors) -> None:
    inputs = [[3 + number, *range(20, 20 + number)] for number in range(64)] * 8
    pid = next(pid for name, pid in served.pids().items() if "engine" in name)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(embedded, client, inputs, extra_body={"pooling": "mean"})
        os.kill(pid, signal.SIGKILL)
        np.testing.assert_allclose(waiting.result(), np.tile(vectors(inputs[:64], "mean"), (8, 1)), atol=1e-4)


def test_the_offline_api_gives_the_same(model: Path, vectors: Vectors) -> None:
    with LLM(str(model), **FLAGS) as llm:
        found = llm.embed(TEXTS, use_tqdm=False)
        np.testing.assert_allclose([one.outputs.embedding for one in found], vectors(TEXTS), atol=1e-4)
        [short] = llm.embed({"prompt_token_ids": [5, 6]}, PoolingParams(kind="mean", dimensions=4), use_tqdm=False)
        np.testing.assert_allclose(short.outputs.embedding, vectors([[5, 6]], "mean", 4)[0], atol=1e-4)
        scores = llm.score(TEXTS[0], TEXTS, use_tqdm=False)
        assert [one.outputs.score for one in scores] == pytest.approx(vectors(TEXTS) @ vectors(TEXTS)[0], abs=1e-4)
        with pytest.raises(ValueError, match="between 1 and 64"):
            llm.embed(TEXTS, PoolingParams(dimensions=65), use_tqdm=False)
        with pytest.raises(ValueError, match="give one text_1"):
            llm.score(TEXTS[:2], TEXTS)
        assert llm.generate("Hello", use_tqdm=False)[0].outputs[0].token_ids
