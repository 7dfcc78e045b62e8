"""Bodies of embeddings, score and rerank as requests, the scores made of vectors, and the texts of large requests."""

import base64
import json
import math
import struct
from array import array
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.services.gateway.apis.openai.bodies import request_fields
from antiphon.services.gateway.apis.openai.pooling import answers, requests, schemas
from antiphon.services.gateway.edge.http.request_body import read_body, read_fields
from antiphon.services.gateway.path.generation import GenerationRequest, ModelCard, PromptInputs
from antiphon.services.gateway.path.requests.preparation import tokenize
from antiphon.shared import limits
from antiphon.shared.codec import pack_ids
from antiphon.shared.errors import ServiceError
from antiphon.shared.messages import TokenizedPrompt, TokenizeReply, TokenizeRequest
from antiphon.shared.parameters.pooling import PoolingParams, check, unpack_vector
from antiphon.shared.parameters.sampling import SamplingParams
from tests.unit.gateway.bodies import refusal

CARD = ModelCard(name="toy", path="/models/toy", max_model_len=512, vocab_size=300, created=1, embedding_size=8)
INPUTS_MAX = limits.EMBEDDING_INPUTS_MAX


def embeddings(card: ModelCard = CARD, **fields: Any) -> GenerationRequest:
    data = json.dumps({"input": "hello", **fields}).encode()
    request_fields.check(read_fields(data), schemas.EmbeddingBody, request_fields.OPENAI._replace(is_strict=True))
    return requests.embeddings(read_body(data, schemas.EMBEDDING_DECODER), card, "r" * 22)


def score(**fields: Any) -> GenerationRequest:
    data = json.dumps({"text_1": "one", "text_2": ["two", "three"], **fields}).encode()
    request_fields.check(read_fields(data), schemas.ScoreBody, request_fields.OPENAI._replace(is_strict=True))
    return requests.score(read_body(data, schemas.SCORE_DECODER), CARD, "r" * 22)


def rerank(**fields: Any) -> GenerationRequest:
    data = json.dumps({"query": "what", "documents": ["one", {"text": "two"}], **fields}).encode()
    request_fields.check(read_fields(data), schemas.RerankBody, request_fields.OPENAI._replace(is_strict=True))
    return requests.rerank(read_body(data, schemas.RERANK_DECODER), CARD, "r" * 22)


def packed(*values: float) -> bytes:
    return array("f", values).tobytes()


def test_embeddings_have_openai_s_defaults():
    request = embeddings()
    assert request.pooling == PoolingParams(kind=None, normalize=True, dimensions=None)
    assert (request.inputs.texts, request.inputs.token_ids, request.n) == (("hello",), (), 1)
    assert (request.inputs.add_special_tokens, request.priority) == (True, 0)


@pytest.mark.parametrize(
    ("given_input", "texts", "token_ids", "names"),
    [
        ("a", ("a",), (), ("input",)),
        (["a"], ("a",), (), ("input",)),
        (["a", "b"], ("a", "b"), (), ("input[0]", "input[1]")),
        ([1, 2], (), ((1, 2),), ("input",)),
        ([[1], [2, 3]], (), ((1,), (2, 3)), ("input[0]", "input[1]")),
    ],
)
def test_an_input_has_every_form_of_openai(given_input: Any, texts: Any, token_ids: Any, names: Any):
    request = embeddings(input=given_input)
    assert (request.inputs.texts, request.inputs.token_ids, request.inputs.names) == (texts, token_ids, names)


def test_fields_of_embeddings_arrive():
    request = embeddings(
        pooling="mean", normalize=False, dimensions=3, add_special_tokens=False, priority=-2, user="me",
        encoding_format="base64",
    )  # fmt: skip
    assert request.pooling == PoolingParams(kind="mean", normalize=False, dimensions=3)
    assert (request.inputs.add_special_tokens, request.priority) == (False, -2)


@pytest.mark.parametrize(
    ("code", "param", "fields"),
    [
        ("missing_required_parameter", "input", {"input": None}),
        ("invalid_value", "input", {"input": []}),
        ("invalid_value", "input", {"input": ["a", 1]}),
        ("invalid_value", "input", {"input": [[300]]}),
        ("invalid_value", "input", {"input": ["a"] * (INPUTS_MAX + 1)}),
        ("invalid_value", "encoding_format", {"encoding_format": "hex"}),
        ("invalid_value", "embed_dtype", {"embed_dtype": "fp8_e4m3"}),
        ("invalid_value", "endianness", {"endianness": "middle"}),
        ("invalid_value", "dimensions", {"dimensions": 0}),
        ("invalid_value", "dimensions", {"dimensions": 9}),
        ("invalid_value", "dimensions", {"dimensions": 2.5}),
        ("invalid_value", "pooling", {"pooling": "max"}),
        ("invalid_value", "priority", {"priority": 2**31}),
        ("invalid_value", "truncate_prompt_tokens", {"truncate_prompt_tokens": 0}),
        ("invalid_value", "truncate_prompt_tokens", {"truncate_prompt_tokens": -2}),
        ("invalid_value", "truncate_prompt_tokens", {"truncate_prompt_tokens": 513}),
        ("unsupported_parameter", "temperature", {"temperature": 1}),
    ],
)
def test_wrong_fields_of_embeddings_are_named(code: str, param: str, fields: Any):
    refusal(embeddings, code, param, **fields)


@pytest.mark.parametrize(("given_number", "kept"), [(None, 0), (3, 3), (512, 512), (-1, 512)])
def test_the_number_of_tokens_to_keep_arrives(given_number: int | None, kept: int):
    for make in (embeddings, score, rerank):
        assert make(truncate_prompt_tokens=given_number).inputs.truncate_prompt_tokens == kept


def test_a_model_whose_engine_gives_no_vectors_refuses_by_name():
    with pytest.raises(ServiceError, match="gives no embeddings") as error:
        embeddings(card=ModelCard(name="toy", path="", max_model_len=512, vocab_size=300, created=1))
    assert (error.value.code, error.value.param) == ("unsupported_parameter", "model")


def test_pairs_are_one_with_many_or_item_by_item():
    request = score()
    assert (request.inputs.texts, request.pooling) == (("one", "two", "three"), PoolingParams())
    assert request.inputs.names == ("text_1", "text_2[0]", "text_2[1]")
    assert score(text_1=["a", "b"]).inputs.texts == ("a", "b", "two", "three")
    refusal(score, "invalid_value", "text_1", text_1=["a", "b", "c"])
    refusal(score, "invalid_value", "text_2", text_2=[])
    refusal(score, "missing_required_parameter", "text_1", text_1=None)


def test_rerank_asks_for_the_query_and_every_document():
    request = rerank()
    assert request.inputs.texts == ("what", "one", "two")
    assert request.inputs.names == ("query", "documents[0]", "documents[1]")
    for param in ("query", "documents"):
        refusal(rerank, "missing_required_parameter", param, **{param: None})
    refusal(rerank, "invalid_value", "documents", documents=[])
    refusal(rerank, "invalid_value", "documents", documents=["a"] * (INPUTS_MAX + 1))
    refusal(rerank, "invalid_value", "top_n", top_n=0)


def test_a_ranking_in_the_form_of_tei():
    tei: dict[str, Any] = {"documents": None, "texts": ["one", "two"]}
    request = rerank(**tei, truncate=True, raw_scores=True)
    assert (request.inputs.texts, request.inputs.truncate_prompt_tokens) == (("what", "one", "two"), 512)
    assert request.inputs.names == ("query", "texts[0]", "texts[1]")
    refusal(rerank, "invalid_value", "texts", texts=["one"])
    refusal(rerank, "invalid_value", "texts", documents=None, texts=[])
    for name in ("return_text", "raw_scores", "truncate"):
        refusal(rerank, "invalid_value", name, **{name: True})
    assert json.loads(answers.tei_ranking([0.1, 0.9, 0.1], 2, None)) == [
        {"index": 1, "score": 0.9},
        {"index": 0, "score": 0.1},
    ]
    assert json.loads(answers.tei_ranking([0.1], None, ["a"])) == [{"index": 0, "score": 0.1, "text": "a"}]


@pytest.mark.parametrize(
    ("dtype", "order", "code"), [(None, None, "<f"), ("float32", "big", ">f"), ("float16", "little", "<e")]
)
def test_the_numbers_in_base64_have_the_type_and_the_order_that_is_asked_for(dtype: Any, order: Any, code: str):
    body = schemas.EmbeddingBody(encoding_format="base64", embed_dtype=dtype, endianness=order)
    [item] = answers.embedding_items([packed(1.5, -0.25)], requests.encoding(body))
    assert list(struct.iter_unpack(code, base64.b64decode(json.loads(item)["embedding"]))) == [(1.5,), (-0.25,)]
    [large] = answers.embedding_items([packed(-70000.0)], "<e")
    assert struct.unpack("<e", base64.b64decode(json.loads(large)["embedding"])) == (-math.inf,)


def test_cosines_pair_one_with_many_or_item_by_item():
    half = math.sqrt(0.5)
    vectors = [packed(1, 0), packed(0, 1), packed(half, half)]
    assert list(answers.cosines(vectors[:1], vectors)) == pytest.approx([1, 0, half])
    assert list(answers.cosines(vectors, vectors)) == pytest.approx([1, 1, 1])


def test_a_ranking_is_stable_and_as_long_as_asked():
    body = json.loads(answers.ranking({"id": "x"}, [0.1, 0.9, 0.1], 7, 2, ["a", "b", "c"]))
    assert body["results"] == [
        {"index": 1, "document": {"text": "b"}, "relevance_score": 0.9},
        {"index": 0, "document": {"text": "a"}, "relevance_score": 0.1},
    ]
    assert body["usage"] == {"prompt_tokens": 7, "total_tokens": 7}
    without = json.loads(answers.ranking({}, [0.1], 7, None, None))
    assert without["results"] == [{"index": 0, "relevance_score": 0.1}]


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=9))
def test_a_vector_survives_packing(values: list[float]):
    assert unpack_vector(packed(*values)).tolist() == values


def test_dimensions_are_at_most_those_of_the_model():
    for dimensions in (None, 1, 8):
        check(PoolingParams(dimensions=dimensions), 8)
    for dimensions in (-1, 0, 9):
        with pytest.raises(ServiceError, match="between 1 and 8"):
            check(PoolingParams(dimensions=dimensions), 8)


class Tokenizers:
    """Answers with one token for each character."""

    def __init__(self) -> None:
        self.messages: list[TokenizeRequest] = []

    async def tokenizer(
        self, message: TokenizeRequest, size: int, headers: Any, on_silent: Any = None
    ) -> TokenizeReply:
        assert size == sum(map(len, message.prompts))
        self.messages.append(message)
        prompts = (TokenizedPrompt(token_ids=pack_ids(list(text.encode()))) for text in message.prompts)
        return TokenizeReply(request_id=message.request_id, prompts=tuple(prompts))


@given(st.lists(st.integers(1, 6), min_size=1, max_size=90))
async def test_many_texts_are_tokenized_in_several_messages_in_their_order(lengths: list[int]):
    texts = tuple("x" * (length * limits.TOKENIZE_CHARS_MAX // 4) for length in lengths)
    names = tuple(f"input[{index}]" for index in range(len(texts)))
    request = GenerationRequest(
        request_id="r",
        model="toy",
        params=SamplingParams(),
        inputs=PromptInputs(texts=texts, names=names),
        pooling=PoolingParams(),
    )
    clients, card = Tokenizers(), replace(CARD, max_model_len=max(map(len, texts)))
    prompts = (await tokenize(clients, request, card, 16)).prompts  # type: ignore[arg-type]
    assert [prompt.num_tokens for prompt in prompts] == list(map(len, texts))
    assert sum((message.prompts for message in clients.messages), ()) == texts
    assert sum((message.prompt_names for message in clients.messages), ()) == names
    for message in clients.messages:
        assert 1 <= len(message.prompts) <= limits.PROMPTS_MAX
        assert len(message.prompts) == 1 or sum(map(len, message.prompts)) <= limits.TOKENIZE_CHARS_MAX
        assert not message.generates


async def test_a_text_without_tokens_is_named():
    request = GenerationRequest(
        request_id="r",
        model="toy",
        params=SamplingParams(),
        inputs=PromptInputs(texts=("a", ""), names=("input[0]", "input[1]")),
    )
    with pytest.raises(ServiceError, match=r"'input\[1\]' has no tokens") as error:
        await tokenize(Tokenizers(), request, CARD, 16)  # type: ignore[arg-type]
    assert error.value.param == "input[1]"
