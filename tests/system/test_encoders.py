"""An encoder and a cross-encoder through the whole system, against transformers, also offline."""

import concurrent.futures
import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
from numpy.typing import NDArray

from antiphon import LLM, PoolingParams
from tests.system.served import Served, fetch, serve_tiny, until_the_end, wait_until
from tests.whole_text_models import VOCAB, write_encoder, write_sentence_files, write_token_classifier

pytestmark = [pytest.mark.system, pytest.mark.nats, pytest.mark.timeout(300)]
TEXTS = ["The cat sat on the mat.", "a dog in the fog", "pets", "the kitten sat on a stone, 12 dogs"]
QUERY = "cats and dogs"
EXACT: dict[str, Any] = {"atol": 1e-5, "rtol": 1e-5}
FLAGS = {"dtype": "float32", "threads": 1}


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_encoder(tmp_path_factory.mktemp("encoder"), "bert", num_hidden_layers=6)
    write_sentence_files(directory, {"pooling_mode_mean_tokens": True})
    return directory


@pytest.fixture(scope="module")
def ranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("ranker"), "bert", num_labels=1)


JUDGE = {
    "architectures": ["Qwen3ForSequenceClassification"],
    "classifier_from_token": ["cat", "dog"],
    "is_original_qwen3_reranker": True,
}
"""What vLLM takes as `--hf-overrides` for Qwen3-Reranker, with tokens of this vocabulary."""


SCORE = """the query: {{ (messages | selectattr("role", "eq", "query") | first).content }}
the document: {{ (messages | selectattr("role", "eq", "document") | first).content }} is it?"""
"""A score template as vLLM takes it."""


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A language model as it is published: its config.json names no head."""
    return write_token_classifier(tmp_path_factory.mktemp("judge"), "qwen3", {"architectures": ["Qwen3ForCausalLM"]})


@pytest.fixture(scope="module")
def served(encoder: Path, ranker: Path, judge: Path) -> Iterator[Served]:
    """Two engines for each of two models, and one for a third."""
    third = {
        "model": str(judge),
        "served-model-name": "judge",
        "engines": 1,
        "hf-overrides": JUDGE,
        "chat-template": SCORE,
    }
    (models := judge / "models.json").write_text(json.dumps({"models": [third]}))
    flags = (f"--also={ranker}=ranker", f"--models={models}", "--dtype=float32", "--engines=2", "--threads=1")
    with until_the_end(serve_tiny(encoder, *flags)) as started:
        yield started


def tokenized(directory: Path, *texts: Any, **options: Any) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory)(*texts, padding=True, return_tensors="pt", **options)


def sentence_vectors(directory: Path, texts: list[str], **options: Any) -> NDArray[np.float64]:
    """What sentence-transformers makes of them: the means of their hidden states, scaled to length one."""
    from transformers import AutoModel

    inputs = tokenized(directory, texts, **options)
    with torch.inference_mode():
        hidden = AutoModel.from_pretrained(directory).eval()(**inputs).last_hidden_state.double()
    mask = inputs["attention_mask"].unsqueeze(-1)
    means = ((hidden * mask).sum(1) / mask.sum(1)).numpy()
    return means / np.linalg.norm(means, axis=1, keepdims=True)


def pair_logits(directory: Path, first: list[str], second: list[str], **options: Any) -> NDArray[np.float64]:
    from transformers import AutoModelForSequenceClassification

    with torch.inference_mode():
        model = AutoModelForSequenceClassification.from_pretrained(directory).eval()
        return model(**tokenized(directory, first, second, **options)).logits[:, 0].double().numpy()


def sigmoid(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return 1 / (1 + np.exp(-values))


def test_vectors_and_cosines_are_those_of_sentence_transformers(
    served: Served, client: openai.OpenAI, encoder: Path
) -> None:
    expected = sentence_vectors(encoder, [QUERY, *TEXTS])
    answer = client.embeddings.create(model="tiny", input=[QUERY, *TEXTS])
    np.testing.assert_allclose([one.embedding for one in answer.data], expected, **EXACT)
    assert answer.usage.prompt_tokens == int(tokenized(encoder, [QUERY, *TEXTS])["attention_mask"].sum())
    scores = fetch(served, "POST", "/v1/score", {"model": "tiny", "text_1": QUERY, "text_2": TEXTS}).json["data"]
    np.testing.assert_allclose([one["score"] for one in scores], expected[1:] @ expected[0], **EXACT)


@pytest.mark.parametrize("use_activation", [None, False])
def test_a_cross_encoder_scores_pairs_as_transformers_does(
    served: Served, ranker: Path, use_activation: bool | None
) -> None:
    logits = pair_logits(ranker, [QUERY] * len(TEXTS), TEXTS)
    expected = logits if use_activation is False else sigmoid(logits)
    body = {"model": "ranker", "text_1": QUERY, "text_2": TEXTS, "use_activation": use_activation}
    scores = fetch(served, "POST", "/score", body).json["data"]
    np.testing.assert_allclose([one["score"] for one in scores], expected, **EXACT)
    body = {"model": "ranker", "query": QUERY, "documents": TEXTS, "use_activation": use_activation}
    results = fetch(served, "POST", "/v1/rerank", body).json["results"]
    assert [one["index"] for one in results] == np.argsort(-expected).tolist()
    np.testing.assert_allclose([one["relevance_score"] for one in results], -np.sort(-expected), **EXACT)


@pytest.mark.parametrize("path", ["/classify", "/v1/classify"])
def test_texts_get_their_labels(served: Served, ranker: Path, path: str) -> None:
    answer = fetch(served, "POST", path, {"model": "ranker", "input": TEXTS}).json
    assert [(one["index"], one["label"], one["num_classes"]) for one in answer["data"]] == [
        (index, "LABEL_0", 1) for index in range(len(TEXTS))
    ]
    with LLM(str(ranker), **FLAGS) as llm:
        expected = [one.outputs for one in llm.classify(TEXTS, use_tqdm=False)]
        pairs = llm.score(QUERY, TEXTS, use_tqdm=False)
        with pytest.raises(ValueError, match="no embeddings"):
            llm.embed(TEXTS, use_tqdm=False)
    np.testing.assert_allclose([one["probs"] for one in answer["data"]], [one.probs for one in expected], **EXACT)
    logits = pair_logits(ranker, [QUERY] * len(TEXTS), TEXTS)
    np.testing.assert_allclose([one.outputs.score for one in pairs], sigmoid(logits), **EXACT)


def test_long_texts_keep_their_first_tokens_if_the_request_says_so(
    served: Served, client: openai.OpenAI, encoder: Path, ranker: Path
) -> None:
    texts = [*TEXTS, "cat " * 300]
    for keep, length in ((5, 5), (-1, 130)):
        cut: dict[str, Any] = {"truncation": True, "max_length": length}
        expected = sentence_vectors(encoder, texts, **cut)
        answer = client.embeddings.create(model="tiny", input=texts, extra_body={"truncate_prompt_tokens": keep})
        np.testing.assert_allclose([one.embedding for one in answer.data], expected, **EXACT)
        logits = pair_logits(ranker, [QUERY] * len(texts), texts, **cut)
        body = {"model": "ranker", "truncate_prompt_tokens": keep}
        pairs = fetch(served, "POST", "/v1/score", {**body, "text_1": QUERY, "text_2": texts}).json["data"]
        np.testing.assert_allclose([one["score"] for one in pairs], sigmoid(logits), **EXACT)
        ranked = fetch(served, "POST", "/v1/rerank", {**body, "query": QUERY, "documents": texts}).json["results"]
        np.testing.assert_allclose([one["relevance_score"] for one in ranked], -np.sort(-sigmoid(logits)), **EXACT)
        labels = fetch(served, "POST", "/classify", {**body, "input": texts}).json["data"]
        with LLM(str(ranker), **FLAGS) as llm:
            alone = llm.classify(texts, use_tqdm=False, truncate_prompt_tokens=keep)
            scores = llm.score(QUERY, texts, use_tqdm=False, truncate_prompt_tokens=keep)
        np.testing.assert_allclose([one["probs"] for one in labels], [one.outputs.probs for one in alone], **EXACT)
        np.testing.assert_allclose([one.outputs.score for one in scores], sigmoid(logits), **EXACT)
    for keep in (0, -2, 2, 131):
        answer = fetch(served, "POST", "/v1/embeddings", {"input": "cat", "truncate_prompt_tokens": keep})
        assert answer.status == 400, answer.body
        assert answer.json["error"]["param"] == "truncate_prompt_tokens"


def test_the_offline_api_gives_the_same_vectors(encoder: Path) -> None:
    expected = sentence_vectors(encoder, TEXTS)
    with LLM(str(encoder), **FLAGS) as llm:
        found = llm.embed(TEXTS, use_tqdm=False)
        np.testing.assert_allclose([one.outputs.embedding for one in found], expected, **EXACT)
        raw = llm.encode(TEXTS, PoolingParams(dimensions=4), use_tqdm=False)
        assert [len(one.outputs.data) for one in raw] == [4] * len(TEXTS)
        cut = llm.embed(["cat " * 300, TEXTS[3]], use_tqdm=False, truncate_prompt_tokens=6)
        expected = sentence_vectors(encoder, ["cat " * 300, TEXTS[3]], truncation=True, max_length=6)
        np.testing.assert_allclose([one.outputs.embedding for one in cut], expected, **EXACT)
        (ids,) = llm.encode({"prompt_token_ids": [7, 8, 9, 10]}, use_tqdm=False, truncate_prompt_tokens=3)
        assert ids.prompt_token_ids == [7, 8, 9]
        for keep, told in ((0, "at least 1"), (2, "adds 2 special tokens"), (131, "smaller truncation size")):
            with pytest.raises(ValueError, match=told):
                llm.embed(TEXTS, use_tqdm=False, truncate_prompt_tokens=keep)
        for call, told in ((llm.generate, "generates no text"), (llm.classify, "no classification head")):
            with pytest.raises(ValueError, match=told):
                call(TEXTS, use_tqdm=False)


def yes_or_no(judge: Path, *texts: str) -> float:
    """The probability of the second token behind a text or a pair, by transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(judge, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = model(tokenized(judge, *texts)["input_ids"]).logits[0, -1].double()
    return float(logits[[VOCAB["cat"], VOCAB["dog"]]].softmax(-1)[1])


def test_a_decoder_that_answers_yes_or_no_scores_pairs(judge: Path) -> None:
    with LLM(str(judge), hf_overrides=JUDGE, **FLAGS) as llm:
        found = [one.outputs.score for one in llm.score(QUERY, TEXTS, use_tqdm=False)]
    np.testing.assert_allclose(found, [yes_or_no(judge, QUERY, text) for text in TEXTS], **EXACT)


def test_a_score_template_makes_one_prompt_of_a_pair(served: Served, judge: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(judge)

    def prompt(text: str) -> str:
        messages = [{"role": "query", "content": QUERY}, {"role": "document", "content": text}]
        return tokenizer.apply_chat_template(messages, chat_template=SCORE, tokenize=False)

    expected = [yes_or_no(judge, prompt(text)) for text in TEXTS]
    body = {"model": "judge", "text_1": QUERY, "text_2": TEXTS}
    scores = fetch(served, "POST", "/v1/score", body).json["data"]
    np.testing.assert_allclose([one["score"] for one in scores], expected, **EXACT)
    body = {"model": "judge", "query": QUERY, "documents": TEXTS}
    results = fetch(served, "POST", "/v1/rerank", body).json["results"]
    np.testing.assert_allclose([one["relevance_score"] for one in results], -np.sort(-np.array(expected)), **EXACT)
    body["documents"] = ["cat " * 300]
    assert fetch(served, "POST", "/v1/rerank", body).json["error"]["param"] == "documents"
    [cut] = fetch(served, "POST", "/v1/rerank", {**body, "truncate_prompt_tokens": -1}).json["results"]
    with LLM(str(judge), hf_overrides=JUDGE, chat_template=SCORE, **FLAGS) as llm:
        found = [one.outputs.score for one in llm.score(QUERY, TEXTS, use_tqdm=False)]
        [long] = llm.score(QUERY, "cat " * 300, use_tqdm=False, truncate_prompt_tokens=-1)
        other = llm.score(QUERY, TEXTS, use_tqdm=False, chat_template="{{ messages[1].content }}")
        with pytest.raises(ValueError, match="is neither a file nor a Jinja template"):
            llm.score(QUERY, TEXTS, use_tqdm=False, chat_template="none.jinja")
    np.testing.assert_allclose(found, expected, **EXACT)
    np.testing.assert_allclose(long.outputs.score, cut["relevance_score"], **EXACT)
    assert len(long.prompt_token_ids) <= 130
    np.testing.assert_allclose(
        [one.outputs.score for one in other], [yes_or_no(judge, text) for text in TEXTS], **EXACT
    )


def test_what_a_model_cannot_do_is_a_400_that_names_what_it_can(served: Served) -> None:
    chat = {"messages": [{"role": "user", "content": "cat"}]}
    asked: list[tuple[str, str, Any, str]] = [
        ("tiny", "/v1/completions", {"prompt": "cat"}, "/v1/embeddings"),
        ("tiny", "/v1/chat/completions", chat, "/v1/embeddings"),
        ("tiny", "/v1/messages", {**chat, "max_tokens": 4}, "/v1/embeddings"),
        ("tiny", "/classify", {"input": "cat"}, "It gives embeddings"),
        ("tiny", "/score", {"text_1": "a", "text_2": "a", "use_activation": True}, "leave it out"),
        ("ranker", "/v1/completions", {"prompt": "cat", "stream": True}, "/v1/score, /v1/rerank"),
        ("ranker", "/v1/embeddings", {"input": "cat"}, "/v1/rerank"),
        ("ranker", "/score", {"text_1": "a", "text_2": "a", "pooling": "mean"}, "leave it out"),
        ("ranker", "/score", {"text_1": "a", "text_2": ["b", "cat " * 200]}, "text_2[1]"),
    ]
    for model, path, body, told in asked:
        answer = fetch(served, "POST", path, {"model": model, **body})
        assert answer.status == 400, (path, answer.body)
        assert told in answer.body.decode(), (path, answer.body)
    cards = {card["id"]: card["tasks"] for card in fetch(served, "GET", "/v1/models").json["data"]}
    expected = {"tiny": ["embed", "score"], "ranker": ["classify", "score"], "judge": ["classify", "score"]}
    assert cards == expected


def test_vectors_arrive_although_an_engine_is_killed(served: Served, client: openai.OpenAI, encoder: Path) -> None:
    texts = [f"{text} {'the cat sat ' * (number % 30)}" for number in range(32) for text in TEXTS]
    pid = next(pid for name, pid in served.pids().items() if name.startswith("engine"))
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.embeddings.create, model="tiny", input=texts * 16)
        wait_until(lambda: waiting.done() or _running(served), 60)
        os.kill(pid, signal.SIGKILL)
        found = np.array([one.embedding for one in waiting.result().data])
    np.testing.assert_allclose(found, np.tile(sentence_vectors(encoder, texts), (16, 1)), **EXACT)


def _running(served: Served) -> bool:
    metrics = fetch(served, "GET", "/metrics").body.decode()
    return any(float(number) > 0 for number in re.findall(r"^vllm:num_requests_running\{.*\} (\S+)", metrics, re.M))
