"""The layer that predicts further tokens: what it predicts, against a plain reference, and that it changes no token."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from antiphon.services.engine.backends.torch.staged_worker import StagedWorker
from antiphon.services.engine.backends.torch.worker import TorchWorker
from antiphon.services.engine.core.plan import CoreLimits, StepPlan, StepResult
from antiphon.services.engine.core.request import SequenceSpec
from antiphon.services.engine.worker.interface import ModelWorker
from antiphon.shared.parameters.sampling import SamplingParams
from tests.draft_models import DRAFT_FAMILIES, drafter_of, make_draft_model, make_prophet
from tests.model.harness import BACKENDS, Engine, greedy, make_prompt, make_worker, settings
from tests.models import make_model
from tests.support.ranks import RankThreads, StagedRanks
from tests.support.slow import slow_but

pytestmark = pytest.mark.model

DraftModels = Callable[[str], Path]
MOST = 3
CPU = torch.device("cpu")
LIMITS = CoreLimits(max_num_seqs=4, max_num_batched_tokens=24, num_speculative_tokens=MOST, use_lookahead=False)


@pytest.fixture(scope="module")
def draft_models(tmp_path_factory: pytest.TempPathFactory) -> DraftModels:
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            made[family] = make_draft_model(tmp_path_factory.mktemp("drafts"), family)
        return made[family]

    return make


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences want drafts in every step, however few are accepted: no step runs without the layer."""
    monkeypatch.setattr("antiphon.services.engine.core.drafts.drafter.PredictedTokens.num_wanted", lambda *_: MOST)


class Watched:
    """An engine whose worker's drafts are compared with those of the reference after each step."""

    def __init__(self, directory: Path, limits: CoreLimits, worker: ModelWorker) -> None:
        self._run, self._drafter = worker.run, drafter_of(directory)
        self._rows: dict[int, list[int]] = {}
        self.num_drafts: list[int] = []
        worker.run = self.run  # type: ignore[method-assign]
        self.engine = Engine.around(worker, limits)

    def run(self, plan: StepPlan) -> StepResult:
        result = self._run(plan)
        for new in plan.new:
            self._rows[new.row] = list(new.token_ids)
        samples = [share for share in plan.scheduled if share.samples]
        for share, given in zip(samples, result.token_ids, strict=True):
            self._rows[share.row] += given
        for share, drafts in zip(samples, result.draft_token_ids, strict=False):
            assert len(drafts) <= max(0, share.num_drafts)
            if share.num_drafts > 0:
                assert list(drafts) == self._drafter.draft(self._rows[share.row], len(drafts))
                self.num_drafts.append(len(drafts))
        return result


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", slow_but(["qwen3_5_text", "glm4_moe"], DRAFT_FAMILIES))
def test_the_layer_predicts_what_the_reference_does(
    family: str, backend: str, draft_models: DraftModels, always: None
) -> None:
    """Prompts in chunks, beside sequences that decode, after hits of the prefix cache; also several tokens ahead."""
    directory = draft_models(family)
    worker = make_worker(backend, directory, max_num_seqs=LIMITS.max_num_seqs, use_mtp=True)
    watched = Watched(directory, LIMITS, worker)
    prompts = [make_prompt(length) for length in (50, 7, 33, 40)]
    first = watched.engine.generate(prompts)
    assert watched.engine.generate(prompts) == first
    assert max(watched.engine.cached.values()) > 0
    assert max(watched.num_drafts) == MOST
    assert len(watched.num_drafts) > 100


OTHER_NUMBERS: list[dict[str, Any]] = [
    {"quantization": "ifq"},
    {"dtype": "bfloat16", "kv_cache_dtype": "fp8_e5m2", "threads": 2},
]


@pytest.mark.parametrize(
    ("family", "backend", "use_lookahead", "overrides"),
    [
        *(
            (family, backend, use_lookahead, {})
            for family in ("deepseek_v3", "glm4_moe")
            for backend in BACKENDS
            for use_lookahead in (False, True)
        ),
        ("qwen3_5_text", "native", True, {}),
        pytest.param("qwen3_5_text", "native", False, {}, marks=pytest.mark.slow),
        pytest.param("qwen3_5_text", "torch", False, {}, marks=pytest.mark.slow),
        pytest.param("qwen3_5_text", "torch", True, {}, marks=pytest.mark.slow),
        *(
            (family, "native", False, overrides)
            for family in ("qwen3_5_moe_text", "glm4_moe_lite")
            for overrides in OTHER_NUMBERS
        ),
    ],
)
def test_drafts_change_no_token(
    family: str, backend: str, use_lookahead: bool, overrides: dict[str, Any], draft_models: DraftModels
) -> None:
    """Eight sequences, greedy and drawn; with few blocks some are preempted; and again, with cached prefixes."""
    directory = draft_models(family)
    prompts = [make_prompt(length) for length in (30, 50, 5, 33, 64, 17, 1, 48)]
    found: list[list[list[int]]] = []
    for drafts in (0, MOST):
        limits = CoreLimits(
            max_num_seqs=8, max_num_batched_tokens=48, num_speculative_tokens=drafts, use_lookahead=use_lookahead
        )
        engine = Engine(
            directory, limits, backend,
            num_gpu_blocks_override=22, max_model_len=160, use_mtp=drafts > 0, **overrides,
        )  # fmt: skip
        assert engine.worker.facts().has_draft_layer == (drafts > 0)
        found.append(mixed(engine, prompts) + mixed(engine, prompts))
        counters = engine.core.counters()
        assert counters.preemptions > 0
        assert (counters.drafted_tokens > 50) == (drafts > 0)
    assert found[0] == found[1]


def mixed(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    """What the prompts are continued with, every other one drawn at random, some with penalties."""
    output: dict[str, list[int]] = {f"{len(engine.plans)}-{i}": [] for i in range(len(prompts))}
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.7, "seed": 5},
        {"temperature": 0.0, "repetition_penalty": 1.2},
        {"temperature": 0.3, "seed": 6, "top_k": 9},
    ]
    for index, (name, prompt) in enumerate(zip(output, prompts, strict=True)):
        params = SamplingParams(max_tokens=40, ignore_eos=True, **kinds[index % len(kinds)])
        engine.core.add(SequenceSpec(sequence_id=name, prompt_token_ids=tuple(prompt), params=params))
    while any(name in engine.core for name in output):
        for outcome in engine.step():
            output[outcome.sequence_id] += outcome.token_ids
    return list(output.values())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", ["qwen3_5_text", "deepseek_v3"])
def test_each_accepted_token_saves_a_step(family: str, backend: str, tmp_path: Path) -> None:
    """With a layer that is right by construction, and with one that is right sometimes."""
    num_tokens, prompt = 120, make_prompt(20)
    for share in (1.0, 0.6):
        directory = tmp_path / str(share)
        directory.mkdir()
        make_prophet(directory, family, share)
        limits = CoreLimits(max_num_seqs=2, num_speculative_tokens=MOST, use_lookahead=False)
        engine = Engine(directory, limits, backend, use_mtp=True)
        [tokens] = engine.generate([prompt], greedy(num_tokens))
        counters = engine.core.counters()
        assert len(tokens) == num_tokens
        assert len(engine.plans) == num_tokens - counters.accepted_tokens
        if share == 1.0:
            assert counters.accepted_tokens == counters.drafted_tokens
            assert len(engine.plans) < num_tokens / 2.5
        else:
            assert 0 < counters.accepted_tokens < counters.drafted_tokens


@pytest.mark.parametrize("family", ["qwen3_5_moe_text", "deepseek_v3", "glm4_moe"])
def test_ranks_predict_what_the_reference_does(family: str, draft_models: DraftModels, always: None) -> None:
    directory = draft_models(family)
    chosen = settings(directory, max_num_seqs=LIMITS.max_num_seqs, use_mtp=True)
    with_two = RankThreads(lambda ranks: TorchWorker(chosen, directory, CPU, ranks), 2, 1)
    watched = Watched(directory, LIMITS, with_two)
    alone = Engine(directory, LIMITS, "torch")
    prompts = [make_prompt(length) for length in (40, 7, 20)]
    assert watched.engine.generate(prompts) == alone.generate(prompts)
    assert len(watched.num_drafts) > 30


def test_stages_predict_nothing_and_say_why(draft_models: DraftModels, caplog: pytest.LogCaptureFixture) -> None:
    directory = draft_models("glm4_moe")
    chosen = settings(directory, max_num_seqs=LIMITS.max_num_seqs, use_mtp=True)
    ranks = StagedRanks(lambda ranks: StagedWorker(chosen, directory, CPU, ranks), 1, 2)
    assert not ranks.facts().has_draft_layer
    assert caplog.text.count("--use-mtp has no effect: ") == 1
    assert "needs all layers on one device" in caplog.text


@pytest.mark.parametrize(
    ("family", "because"),
    [("llama", "has no layer that predicts further tokens"), ("deepseek_v3", "lacks the layer that predicts")],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_checkpoint_without_the_layer_is_served_without_it(
    family: str, because: str, backend: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    worker = make_worker(backend, make_model(tmp_path, family), use_mtp=True)
    assert not worker.facts().has_draft_layer
    assert f"--use-mtp has no effect: {because}" in caplog.text.replace("this model ", "").replace(
        "the checkpoint ", ""
    )


def test_the_layer_is_not_read_unless_it_is_asked_for(draft_models: DraftModels) -> None:
    """Its tensors are as if they were not there, and its part of the KV cache too."""
    workers = [make_worker("torch", draft_models("glm4_moe"), use_mtp=use_mtp) for use_mtp in (False, True)]
    without, with_layer = (worker.kv_memory().layout.num_layers for worker in workers)  # type: ignore[attr-defined]
    assert (without, with_layer) == (2, 3)
    assert workers[0].facts().content != workers[1].facts().content
