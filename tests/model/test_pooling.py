"""Vectors of pooling sequences against transformers' hidden states, on every backend, whole and in chunks."""

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from antiphon.services.engine.core.plan import CoreLimits
from antiphon.services.engine.core.request import SequenceSpec
from antiphon.services.engine.engine import Engine as Product
from antiphon.services.engine.steps.loop import StepReport
from antiphon.services.engine.worker.interface import ModelWorker
from antiphon.shared.errors import ServiceError
from antiphon.shared.parameters.pooling import PoolingKind, PoolingParams, unpack_vector
from antiphon.shared.parameters.sampling import SamplingParams
from tests.model.harness import Models, greedy, make_kernel_worker, make_prompt, make_worker, on_both
from tests.models import greedy_reference

KINDS: tuple[PoolingKind, ...] = ("last", "mean", "cls")
LENGTHS = (5, 33, 1, 70)
VARIANTS = ("llama", "qwen3", "gemma2", "gpt2", "opt", "qwen2 with experts", "olmo2", "granite", "cohere")
LIMITS = CoreLimits(max_num_seqs=4, max_num_batched_tokens=24)
"""The longest prompt takes four steps, beside others."""


@functools.lru_cache(maxsize=2)
def _reference_model(directory: Path) -> Any:
    from transformers import AutoModel

    return AutoModel.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()


def expected(directory: Path, prompt: list[int], params: PoolingParams) -> NDArray[np.float64]:
    """The vector from the last hidden states of transformers' model."""
    with torch.inference_mode():
        hidden = _reference_model(directory)(torch.tensor([prompt])).last_hidden_state[0].double().numpy()
    vector = {"last": hidden[-1], "mean": hidden.mean(0), "cls": hidden[0]}[params.kind or "last"]
    vector = vector[: params.dimensions]
    return vector / np.linalg.norm(vector) if params.normalize else vector


class Pooled:
    """An engine around a worker, and the outcomes of its pooling sequences."""

    def __init__(self, worker: ModelWorker, limits: CoreLimits = LIMITS) -> None:
        self.vectors: dict[str, NDArray[np.float64]] = {}
        self.cached: dict[str, int] = {}
        self.tokens: dict[str, list[int]] = {}
        self.refused: dict[str, str] = {}
        self.engine = Product.of_worker(worker, limits, self._report)

    def run(self, *specs: SequenceSpec) -> list[NDArray[np.float64]]:
        for spec in specs:
            self.engine.add(spec)
        while self.engine.step():
            pass
        assert not self.engine.has_work
        return [self.vectors[spec.sequence_id] for spec in specs if spec.pooling is not None]

    def _report(self, report: StepReport) -> None:
        self.refused |= {sequence_id: error.message for sequence_id, error in report.refused}
        for outcome in report.outcomes:
            self.cached[outcome.sequence_id] = outcome.num_cached_tokens
            self.tokens.setdefault(outcome.sequence_id, []).extend(outcome.token_ids)
            if outcome.vector:
                assert (outcome.token_ids, outcome.finish_reason) == ((), "stop")
                self.vectors[outcome.sequence_id] = np.array(unpack_vector(outcome.vector), dtype=np.float64)


def spec(name: str, prompt: list[int], **fields: Any) -> SequenceSpec:
    return SequenceSpec(
        sequence_id=name,
        prompt_token_ids=tuple(prompt),
        params=SamplingParams(max_tokens=1),
        pooling=PoolingParams(**fields),
    )


@pytest.mark.parametrize(("backend", "variant"), on_both(VARIANTS))
def test_vectors_are_those_of_transformers(models: Models, backend: str, variant: str) -> None:
    directory = models(variant)
    pooled = Pooled(make_worker(backend, directory, max_num_seqs=4))
    prompts = {f"{kind} {length}": (kind, make_prompt(length)) for kind in KINDS for length in LENGTHS}
    specs = [spec(name, prompt, kind=kind, normalize=False) for name, (kind, prompt) in prompts.items()]
    for one, vector in zip(specs, pooled.run(*specs), strict=True):
        assert one.pooling is not None
        wanted = expected(directory, list(one.prompt_token_ids), one.pooling)
        np.testing.assert_allclose(vector, wanted, atol=1e-4, rtol=1e-4, err_msg=one.sequence_id)


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_generation_beside_pooling_gives_the_tokens_that_it_gives_alone(models: Models, backend: str) -> None:
    directory = models("llama")
    pooled = Pooled(make_worker(backend, directory, max_num_seqs=4))
    prompt = make_prompt(20, seed=3)
    specs = [spec(f"v{length}", make_prompt(length), kind="mean") for length in LENGTHS]
    pooled.run(SequenceSpec(sequence_id="text", prompt_token_ids=tuple(prompt), params=greedy(12)), *specs)
    assert pooled.tokens["text"] == greedy_reference(directory, prompt, 12)
    for one in specs:
        wanted = expected(directory, list(one.prompt_token_ids), PoolingParams(kind="mean"))
        np.testing.assert_allclose(pooled.vectors[one.sequence_id], wanted, atol=1e-4)


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_fewer_dimensions_are_cut_before_the_vector_is_scaled(models: Models, backend: str) -> None:
    directory = models("llama")
    prompt = make_prompt(9)
    [vector] = Pooled(make_worker(backend, directory, max_num_seqs=4)).run(spec("v", prompt, dimensions=5))
    assert len(vector) == 5
    assert np.linalg.norm(vector) == pytest.approx(1.0)
    np.testing.assert_allclose(vector, expected(directory, prompt, PoolingParams(dimensions=5)), atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_cached_prefix_is_used_only_where_its_hidden_states_are_not_needed(models: Models, kind: PoolingKind) -> None:
    directory = models("llama")
    pooled = Pooled(make_worker("torch", directory, max_num_seqs=4))
    prompt = make_prompt(40)
    pooled.run(SequenceSpec(sequence_id="text", prompt_token_ids=tuple(prompt), params=greedy(1)))
    [vector] = pooled.run(spec("again", prompt, kind=kind))
    assert pooled.cached["again"] == (32 if kind == "last" else 0)
    np.testing.assert_allclose(vector, expected(directory, prompt, PoolingParams(kind=kind)), atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_preempted_sequences_give_the_same_vectors(models: Models, kind: PoolingKind) -> None:
    directory = models("llama")
    small = {"num_gpu_blocks_override": 6, "block_size": 16, "swap_space": 0.001, "max_model_len": 96}
    pooled = Pooled(make_worker("native", directory, max_num_seqs=4, **small))
    prompts = [make_prompt(length, seed=length) for length in (40, 38, 44)]
    texts = [
        SequenceSpec(
            sequence_id=f"t{i}", prompt_token_ids=tuple(make_prompt(30, seed=i)), params=greedy(20), priority=-1
        )
        for i in range(2)
    ]
    specs = [spec(f"v{i}", prompt, kind=kind) for i, prompt in enumerate(prompts)]
    for vector, prompt in zip(pooled.run(*specs, *texts), prompts, strict=True):
        np.testing.assert_allclose(vector, expected(directory, prompt, PoolingParams(kind=kind)), atol=1e-4)
    assert pooled.engine.counters().preemptions > 0


def without_head(source: Path, directory: Path, modes: dict[str, bool] | None = None, **config: Any) -> Path:
    """A checkpoint of the decoder alone. `modes`: with the files of sentence-transformers."""
    from transformers import AutoModel

    AutoModel.from_pretrained(source).save_pretrained(directory)
    fields = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(fields | config))
    if modes is not None:
        names = ("Transformer", "Pooling", "Normalize")
        modules = [{"idx": i, "type": f"sentence_transformers.models.{name}"} for i, name in enumerate(names)]
        (directory / "modules.json").write_text(json.dumps(modules))
        (directory / "1_Pooling").mkdir()
        (directory / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 64, **modes}))
    return directory


@pytest.mark.parametrize(
    ("backend", "variant"), [*on_both(["qwen3", "glm4 with experts", "gpt_oss"]), ("torch", "cohere, untied")]
)
def test_a_checkpoint_without_a_head_gives_vectors_and_refuses_to_generate(
    models: Models, tmp_path: Path, backend: str, variant: str
) -> None:
    directory = without_head(models(variant), tmp_path)
    pooled = Pooled(make_worker(backend, directory, max_num_seqs=4))
    [vector] = pooled.run(spec("v", make_prompt(9)))
    np.testing.assert_allclose(vector, expected(models(variant), make_prompt(9), PoolingParams()), atol=1e-4)
    pooled.run(SequenceSpec(sequence_id="text", prompt_token_ids=tuple(make_prompt(9)), params=greedy(1)))
    assert "generates no text: it gives embeddings" in pooled.refused["text"]


@pytest.mark.parametrize(("mode", "kind"), [("lasttoken", "last"), ("mean_tokens", "mean"), ("cls_token", "cls")])
def test_the_files_of_sentence_transformers_choose_the_kind(
    models: Models, tmp_path: Path, mode: str, kind: PoolingKind
) -> None:
    modes = {f"pooling_mode_{name}": name == mode for name in ("cls_token", "mean_tokens", "max_tokens", "lasttoken")}
    # The config of such a checkpoint may still name the head that the checkpoint lacks.
    directory = without_head(models("qwen3"), tmp_path, modes, architectures=["Qwen3ForCausalLM"])
    [vector] = Pooled(make_worker("native", directory, max_num_seqs=4)).run(spec("v", make_prompt(9)))
    np.testing.assert_allclose(vector, expected(models("qwen3"), make_prompt(9), PoolingParams(kind=kind)), atol=1e-4)


def test_what_is_not_pooled_here_is_refused_when_the_model_is_loaded(models: Models, tmp_path: Path) -> None:
    foreign = {"max": {"pooling_mode_max_tokens": True}, "both": {"pooling_mode_mean_tokens": True}}
    foreign["both"]["pooling_mode_cls_token"] = True
    for name, modes in foreign.items():
        directory = without_head(models("qwen3"), tmp_path / name, modes)
        with pytest.raises(ServiceError, match="pooling_mode_"):
            make_worker("torch", directory, max_num_seqs=4)
    directory = without_head(models("qwen3"), tmp_path / "sees all", is_causal=False)
    with pytest.raises(ServiceError, match="attention to later tokens"):
        make_worker("torch", directory, max_num_seqs=4)
    directory = without_head(models("qwen3"), tmp_path / "classes", architectures=["Qwen3ForTokenClassification"])
    with pytest.raises(ServiceError, match="classification heads are not supported"):
        make_worker("torch", directory, max_num_seqs=4)


def test_a_prompt_may_fill_the_context_and_not_more(models: Models) -> None:
    directory = models("llama")
    pooled = Pooled(make_worker("torch", directory, max_num_seqs=4, max_model_len=48))
    pooled.run(spec("full", make_prompt(48)))
    pooled.engine.add(spec("longer", make_prompt(49)))
    pooled.engine.step()
    assert "takes at most 48 tokens, and the input has 49" in pooled.refused["longer"]


def test_the_gpu_worker_gives_the_vectors_of_transformers(models: Models) -> None:
    directory = models("llama")
    pooled = Pooled(make_kernel_worker(directory, max_num_seqs=4))
    specs = [spec(kind, make_prompt(length), kind=kind) for kind, length in zip(KINDS, (9, 30, 5), strict=True)]
    vectors = pooled.run(
        SequenceSpec(sequence_id="text", prompt_token_ids=tuple(make_prompt(4)), params=greedy(3)), *specs
    )
    assert pooled.tokens["text"] == greedy_reference(directory, make_prompt(4), 3)
    for one, vector in zip(specs, vectors, strict=True):
        assert one.pooling is not None
        np.testing.assert_allclose(
            vector, expected(directory, list(one.prompt_token_ids), one.pooling), atol=1e-4, err_msg=one.sequence_id
        )
