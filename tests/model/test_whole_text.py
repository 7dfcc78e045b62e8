"""Encoders and classifiers against transformers: vectors, labels, pairs, batches of texts of different lengths."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from antiphon.services.engine.backends.load import load_worker
from antiphon.services.engine.backends.torch.whole_text.kinds import batches
from antiphon.services.engine.backends.torch.whole_text.worker import WholeTextWorker
from antiphon.services.engine.core.request import SequenceSpec
from antiphon.services.engine.engine import Engine, core_limits
from antiphon.services.engine.steps.loop import StepReport
from antiphon.shared.config import EngineSettings
from antiphon.shared.errors import ServiceError
from antiphon.shared.flags import SettingsError
from antiphon.shared.parameters.pooling import PoolingKind, PoolingParams, unpack_vector
from antiphon.shared.parameters.sampling import SamplingParams
from tests.models import make_model
from tests.whole_text_models import (
    DECODERS,
    ENCODERS,
    VOCAB,
    VOCAB_SIZE,
    write_encoder,
    write_sentence_files,
    write_token_classifier,
)

KINDS: tuple[PoolingKind, ...] = ("last", "mean", "cls")
LENGTHS = (5, 33, 1, 70, 34, 32, 128, 5, 6)
EXACT: dict[str, Any] = {"atol": 1e-5, "rtol": 1e-5}


def settings(directory: Path, **fields: Any) -> EngineSettings:
    return EngineSettings(**{"model": str(directory), "dtype": "float32", "max_num_seqs": 8, "threads": 1} | fields)


class Running:
    """An engine, and what its pooling sequences gave."""

    def __init__(self, directory: Path, **fields: Any) -> None:
        self.vectors: dict[str, NDArray[np.float64]] = {}
        self.refused: dict[str, ServiceError] = {}
        self.engine = Engine.build(settings(directory, **fields), self._report)

    def run(self, prompts: list[list[int]], **fields: Any) -> list[NDArray[np.float64]]:
        self.vectors.clear()
        for index, prompt in enumerate(prompts):
            params = PoolingParams(**{name: given(value, index) for name, value in fields.items()})
            self.engine.add(
                SequenceSpec(
                    sequence_id=str(index),
                    prompt_token_ids=tuple(prompt),
                    params=SamplingParams(max_tokens=1),
                    pooling=params,
                )
            )
        while self.engine.step():
            pass
        assert not self.engine.has_work
        return [self.vectors[str(index)] for index in range(len(prompts))]

    def _report(self, report: StepReport) -> None:
        self.refused |= dict(report.refused)
        for outcome in report.outcomes:
            self.vectors[outcome.sequence_id] = np.array(unpack_vector(outcome.vector), dtype=np.float64)


def given(value: Any, index: int) -> Any:
    return value[index] if isinstance(value, list) else value


def prompts(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    made = np.random.default_rng(0)
    return [made.integers(2, VOCAB_SIZE, length).tolist() for length in lengths]


@functools.lru_cache(maxsize=2)
def reference(directory: Path, kind: str) -> Any:
    import transformers

    return getattr(transformers, kind).from_pretrained(directory, dtype=torch.float32).eval()


def expected_hidden(directory: Path, prompt: list[int]) -> NDArray[np.float64]:
    with torch.inference_mode():
        return reference(directory, "AutoModel")(torch.tensor([prompt])).last_hidden_state[0].double().numpy()


def expected_logits(directory: Path, prompt: list[int], num_first: int = 0) -> NDArray[np.float64]:
    model = reference(directory, "AutoModelForSequenceClassification")
    types = torch.tensor([[int(bool(num_first) and place >= num_first) for place in range(len(prompt))]])
    more = {"token_type_ids": types} if num_first else {}
    with torch.inference_mode():
        return model(torch.tensor([prompt]), **more).logits[0].double().numpy()


def sigmoid(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return 1 / (1 + np.exp(-values))


def softmax(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.exp(values) / np.exp(values).sum()


@pytest.mark.parametrize("model_type", ENCODERS)
def test_vectors_are_those_of_transformers_whatever_is_computed_beside(tmp_path: Path, model_type: str) -> None:
    running = Running(write_encoder(tmp_path, model_type))
    assert running.engine.max_model_len >= 128
    for kind in KINDS:
        for prompt, vector in zip(prompts(), running.run(prompts(), kind=kind, normalize=False), strict=True):
            hidden = expected_hidden(tmp_path, prompt)
            wanted = {"last": hidden[-1], "mean": hidden.mean(0), "cls": hidden[0]}[kind]
            np.testing.assert_allclose(vector, wanted, **EXACT)


def test_vectors_are_cut_and_scaled_as_the_request_says(tmp_path: Path) -> None:
    running = Running(write_encoder(tmp_path, "bert"))
    [prompt] = prompts((9,))
    [vector] = running.run([prompt], kind="mean", dimensions=5)
    wanted = expected_hidden(tmp_path, prompt).mean(0)[:5]
    np.testing.assert_allclose(vector, wanted / np.linalg.norm(wanted), **EXACT)


@pytest.mark.parametrize("model_type", [*ENCODERS, *DECODERS])
def test_labels_are_those_of_transformers_whatever_is_computed_beside(tmp_path: Path, model_type: str) -> None:
    running = Running(write_encoder(tmp_path, model_type, num_labels=3))
    assert running.engine.facts.labels == ("LABEL_0", "LABEL_1", "LABEL_2")
    activate = [index % 2 == 0 for index in range(len(LENGTHS))]
    found = running.run(prompts(), classify=True, activate=activate)
    for prompt, active, vector in zip(prompts(), activate, found, strict=True):
        logits = expected_logits(tmp_path, prompt)
        np.testing.assert_allclose(vector, softmax(logits) if active else logits, **EXACT)


RERANKER = {"classifier_from_token": ["cat", "dog"], "is_original_qwen3_reranker": True}


@pytest.mark.parametrize("model_type", DECODERS)
@pytest.mark.parametrize("tied", [True, False])
def test_the_answer_of_a_decoder_is_the_probability_of_a_token_against_another(
    tmp_path: Path, model_type: str, tied: bool
) -> None:
    running = Running(write_token_classifier(tmp_path, model_type, RERANKER, tie_word_embeddings=tied))
    assert running.engine.facts.labels == ("LABEL_0",)
    texts = [*prompts(), [5, 6, 0]]
    activate = [index % 2 == 0 for index in range(len(texts))]
    found = running.run(texts, classify=True, activate=activate)
    ids = [VOCAB["cat"], VOCAB["dog"]]
    for prompt, active, vector in zip(texts, activate, found, strict=True):
        with torch.inference_mode():
            logits = reference(tmp_path, "AutoModelForCausalLM")(torch.tensor([prompt])).logits[0, -1, ids].double()
        no, yes = logits.numpy()
        np.testing.assert_allclose(vector, [softmax(logits.numpy())[1] if active else yes - no], **EXACT)


def test_the_answer_of_a_decoder_may_be_the_logits_of_tokens(tmp_path: Path) -> None:
    fields = {"classifier_from_token": ["cat", "dog", "fog"], "method": "no_post_processing"}
    running = Running(write_token_classifier(tmp_path, "qwen3", fields))
    [prompt] = prompts((9,))
    [vector] = running.run([prompt], classify=True, activate=False)
    with torch.inference_mode():
        logits = reference(tmp_path, "AutoModelForCausalLM")(torch.tensor([prompt])).logits[0, -1]
    np.testing.assert_allclose(vector, logits[[VOCAB[token] for token in ("cat", "dog", "fog")]].numpy(), **EXACT)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"classifier_from_token": ["cat", "xyz"]}, "'xyz', which is no token"),
        ({"classifier_from_token": ["cat"]}, "must have two tokens"),
        ({"classifier_from_token": None}, "must be a list of tokens"),
        ({"method": "largest"}, "supported are from_2_way_softmax and no_post_processing"),
    ],
)
def test_a_wrong_head_of_tokens_is_refused_when_the_model_is_loaded(
    tmp_path: Path, fields: dict[str, Any], told: str
) -> None:
    with pytest.raises(ServiceError, match=told):
        load_worker(settings(write_token_classifier(tmp_path, "llama", RERANKER | fields)))


def test_of_a_pair_the_second_text_has_the_second_type(tmp_path: Path) -> None:
    running = Running(write_encoder(tmp_path, "bert", num_labels=1))
    first = [0, 3, 1, 30, 0, 20, 60, 2, 4]
    for prompt, num_first, vector in zip(
        prompts(), first, running.run(prompts(), classify=True, num_first_tokens=first), strict=True
    ):
        np.testing.assert_allclose(vector, sigmoid(expected_logits(tmp_path, prompt, num_first)), **EXACT)
    assert np.abs(expected_logits(tmp_path, prompts()[1], 3) - expected_logits(tmp_path, prompts()[1])).max() > 1e-3


@pytest.mark.parametrize(
    ("config", "activation"),
    [
        ({"problem_type": "regression"}, lambda x: x),
        ({"problem_type": "multi_label_classification"}, sigmoid),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, lambda x: x),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid"}, sigmoid),
    ],
)
def test_the_model_s_files_choose_the_activation(tmp_path: Path, config: dict[str, Any], activation: Any) -> None:
    running = Running(write_encoder(tmp_path, "bert", num_labels=2, id2label={0: "no", 1: "yes"}, **config))
    assert running.engine.facts.labels == ("no", "yes")
    [prompt] = prompts((9,))
    [vector] = running.run([prompt], classify=True)
    np.testing.assert_allclose(vector, activation(expected_logits(tmp_path, prompt)), **EXACT)


@pytest.mark.parametrize(
    ("modes", "kind"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "mean"),
        ({"pooling_mode_cls_token": True}, "cls"),
        ({"pooling_mode": "mean"}, "mean"),
        ({"pooling_mode": "lasttoken"}, "last"),
        (None, "cls"),
    ],
)
def test_the_files_of_sentence_transformers_choose_the_kind(
    tmp_path: Path, modes: dict[str, Any] | None, kind: PoolingKind
) -> None:
    write_encoder(tmp_path, "bert", max_position_embeddings=64)
    if modes is not None:
        write_sentence_files(tmp_path, modes, max_seq_length=48)
    running = Running(tmp_path)
    assert running.engine.max_model_len == (64 if modes is None else 48)
    [vector] = running.run(prompts((9,)))
    assert running.engine.facts.pooling_kind == kind
    hidden = expected_hidden(tmp_path, prompts((9,))[0])
    wanted = {"last": hidden[-1], "mean": hidden.mean(0), "cls": hidden[0]}[kind]
    np.testing.assert_allclose(vector, wanted / np.linalg.norm(wanted), **EXACT)


def test_positions_behind_the_padding_token_s_are_not_counted_as_context(tmp_path: Path) -> None:
    assert Running(write_encoder(tmp_path, "roberta", max_position_embeddings=66)).engine.max_model_len == 64


def test_a_text_may_fill_the_context_and_be_longer_than_a_step_s_budget(tmp_path: Path) -> None:
    running = Running(write_encoder(tmp_path, "bert"), max_num_batched_tokens=32, use_warmup=True)
    found = running.run(prompts(), kind="mean", normalize=False)
    for prompt, vector in zip(prompts(), found, strict=True):
        np.testing.assert_allclose(vector, expected_hidden(tmp_path, prompt).mean(0), **EXACT)
    with pytest.raises(KeyError):
        running.run(prompts((131,)))
    assert running.refused["0"].code == "context_length_exceeded"


def test_what_a_model_cannot_do_is_refused_with_what_it_can(tmp_path: Path) -> None:
    encoder = Running(write_encoder(tmp_path / "encoder", "bert"))
    classifier = Running(write_encoder(tmp_path / "classifier", "bert", num_labels=2))
    for running, told in ((encoder, "/v1/embeddings"), (classifier, "classifies texts (/classify)")):
        running.engine.add(
            SequenceSpec(sequence_id="text", prompt_token_ids=(5, 6), params=SamplingParams(max_tokens=1))
        )
        running.engine.step()
        assert told in running.refused["text"].message
    for running, classify, told in ((encoder, True, "no classification head"), (classifier, False, "no embeddings")):
        with pytest.raises(KeyError):
            running.run([[5, 6]], classify=classify)
        assert told in running.refused["0"].message


def test_what_cannot_be_run_is_refused_when_the_model_is_loaded(tmp_path: Path) -> None:
    bert = write_encoder(tmp_path / "bert", "bert", num_labels=2)
    for refused in ({"quantization": "ifq"}, {"enable_mm": True}, {"enable_lora": True}):
        with pytest.raises((SettingsError, ServiceError), match="computes texts as a whole"):
            Engine.build(settings(bert, **refused), lambda _: None)
    with pytest.raises(ServiceError, match="this model allows 1 to 130 tokens"):
        load_worker(settings(bert, max_model_len=131))
    activation = {"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.GELU"}}
    with pytest.raises(ServiceError, match="GELU"):
        load_worker(settings(write_encoder(tmp_path / "gelu", "bert", num_labels=2, **activation)))
    with pytest.raises(ServiceError, match="is_decoder"):
        load_worker(settings(write_encoder(tmp_path / "decoder", "bert", is_decoder=True)))
    gpt2 = write_encoder(tmp_path / "gpt2", "gpt2", num_labels=2, n_inner=48, pad_token_id=0)
    with pytest.raises(ServiceError, match="type 'gpt2' is not supported"):
        load_worker(settings(gpt2))
    incomplete = write_encoder(tmp_path / "no head", "bert", architectures=["BertForSequenceClassification"])
    fields = (incomplete / "config.json").read_text().replace('"BertModel"', '"BertForSequenceClassification"')
    (incomplete / "config.json").write_text(fields)
    with pytest.raises(ServiceError, match=r"lacks classifier\.bias"):
        load_worker(settings(incomplete))


def test_a_decoder_is_loaded_as_before(tmp_path: Path) -> None:
    worker = load_worker(settings(make_model(tmp_path, "llama"), cpu_backend="torch", kv_cache_memory_gb=0.01))
    assert not isinstance(worker, WholeTextWorker)
    assert core_limits(settings(tmp_path), worker.facts()).enable_chunked_prefill


def test_texts_of_similar_length_are_computed_together() -> None:
    lengths = [5, 100, 1, 95, 90, 4, 5]
    found = batches(lengths)
    assert found == [[1, 3, 4], [0, 6, 5, 2]]
    assert batches([]) == []
    made = np.random.default_rng(1).integers(1, 512, 500).tolist()
    assert sorted(index for batch in batches(made) for index in batch) == list(range(500))
    for batch in batches(made):
        computed = max(made[index] for index in batch) * len(batch)
        assert sum(made[index] for index in batch) >= 0.75 * computed
