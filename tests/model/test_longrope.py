"""Longrope beyond the original context: the divisors for long contexts serve every sequence of an engine."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from antiphon.services.engine.backends.load import load_worker
from antiphon.services.engine.core.plan import CoreLimits
from antiphon.shared.errors import ServiceError
from tests.model.harness import BACKENDS, Engine, make_prompt, settings
from tests.models import greedy_reference, make_model

pytestmark = pytest.mark.model

ORIGINAL, LONGEST = 64, 512
NUM_TOKENS = 12
ROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.5, 3.1, 4.0],
    "long_factor": [2.0, 2.1, 2.3, 2.6, 3.0, 3.5, 4.1, 5.0],
}


@pytest.fixture(scope="module")
def phi3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(
        tmp_path_factory.mktemp("phi3"),
        "phi3",
        original_max_position_embeddings=ORIGINAL,
        max_position_embeddings=LONGEST,
        rope_parameters=ROPE,
    )


def engine(model: Path, backend: str, max_model_len: int | None = LONGEST) -> Engine:
    return Engine(model, CoreLimits(max_num_seqs=8, max_num_batched_tokens=24), backend, max_model_len=max_model_len)


def expected(model: Path, prompts: list[list[int]], answers: list[list[int]]) -> list[list[int]]:
    pairs = zip(prompts, answers, strict=True)
    return [greedy_reference(model, prompt, NUM_TOKENS, answer) for prompt, answer in pairs]


def generate(one: Engine, prompts: list[list[int]]) -> list[list[int]]:
    return [tokens[:NUM_TOKENS] for tokens in one.generate(prompts)]


@pytest.mark.parametrize("backend", [*BACKENDS, pytest.param("triton", marks=pytest.mark.slow)])
def test_beyond_the_original_context_tokens_are_those_of_transformers_in_chunks_and_from_the_cache(
    backend: str, phi3: Path
) -> None:
    prompts = [make_prompt(length) for length in ((ORIGINAL + 1,) if backend == "triton" else (ORIGINAL + 1, 130))]
    one = engine(phi3, backend)
    answers = generate(one, prompts)
    assert answers == expected(phi3, prompts, answers)
    assert generate(one, prompts) == answers
    assert min(list(one.cached.values())[-len(prompts) :]) >= ORIGINAL


@pytest.mark.parametrize("backend", BACKENDS)
def test_shorter_sequences_have_the_same_divisors_also_where_they_grow_beyond(
    backend: str, phi3: Path, tmp_path: Path
) -> None:
    always_long = tmp_path / "model"
    shutil.copytree(phi3, always_long)
    config = json.loads((phi3 / "config.json").read_text())
    config["rope_parameters"]["short_factor"] = ROPE["long_factor"]
    (always_long / "config.json").write_text(json.dumps(config))
    prompts = [make_prompt(length) for length in (5, ORIGINAL - 5)]
    answers = generate(engine(phi3, backend), prompts)
    assert answers == expected(always_long, prompts, answers)


@pytest.mark.parametrize(("max_model_len", "notices"), [(None, 1), (ORIGINAL, 0), (LONGEST, 0)])
def test_the_log_tells_that_longer_contexts_are_possible(
    max_model_len: int | None, notices: int, phi3: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        load_worker(settings(phi3, max_model_len=max_model_len, cpu_backend="torch")).close()
    said = f"the context is {ORIGINAL} tokens, the length before positions were scaled; --max-model-len allows up to"
    assert caplog.text.count(f"{said} {LONGEST}") == notices


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_usual_context_is_the_original_one_with_its_own_divisors(backend: str, phi3: Path) -> None:
    prompts, usual = [make_prompt(length) for length in (5, 40)], engine(phi3, backend, None)
    answers = generate(usual, prompts)
    assert answers == expected(phi3, prompts, answers)
    facts, long = usual.worker.facts(), engine(phi3, backend).worker.facts()
    assert (facts.max_model_len, long.max_model_len) == (ORIGINAL, LONGEST)
    assert facts.content != long.content
    assert facts.configuration != long.configuration
    with pytest.raises(ServiceError, match=f"this model allows 1 to {LONGEST} tokens"):
        engine(phi3, backend, LONGEST + 1)
