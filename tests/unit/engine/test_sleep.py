"""An engine that frees its memory: the next one gives the same tokens, and reads from a disk what was computed."""

import pytest

from antiphon.services.engine.core.request import SequenceSpec
from antiphon.services.engine.engine import Engine
from antiphon.services.engine.steps.loop import StepReport
from antiphon.shared.config import EngineSettings
from antiphon.shared.parameters.sampling import SamplingParams
from tests.models import make_model

PROMPT, OUTPUT = tuple(3 + number % 50 for number in range(400)), 12
SIZES = {"kv_cache_memory_gb": 0.02, "swap_space": 0.01, "block_size": 16, "max_num_seqs": 4, "threads": 1}


class Reports(list[StepReport]):
    """What an engine has reported."""

    def tokens(self) -> list[int]:
        found = [token for report in self for outcome in report.outcomes for token in outcome.token_ids]
        self.clear()
        return found

    def cached(self) -> int:
        return max(outcome.num_cached_tokens for report in self for outcome in report.outcomes)


def run(engine: Engine, name: str, **more) -> None:
    params = SamplingParams(max_tokens=OUTPUT, temperature=0.0, ignore_eos=True)
    engine.add(SequenceSpec(sequence_id=f"{name}#0", prompt_token_ids=PROMPT, params=params, **more))
    while engine.has_work:
        if not engine.step():
            engine.wait(0.05)


@pytest.mark.parametrize(
    ("backend", "family", "overrides"),
    [
        ("auto", "llama", {}),
        ("torch", "llama", {}),
        ("auto", "mamba2", {}),
        pytest.param("auto", "qwen3_next", {}, marks=pytest.mark.slow),
        pytest.param("torch", "gemma3_text", {}, marks=pytest.mark.slow),
    ],
)
def test_tokens_after_a_sleep_equal_those_before(tmp_path, backend, family, overrides):
    model = make_model(tmp_path / "model", family, max_position_embeddings=512, **overrides)
    settings = EngineSettings(model=str(model), cpu_backend=backend, **SIZES)
    reports, faults = Reports(), list[str]()
    engine = Engine.build(settings, reports.append, on_fault=faults.append)
    run(engine, "first")
    want, golden = reports.tokens(), engine.canary.golden.digest
    for keeps in (True, False, True):
        before = engine.counters()
        kept = engine.leave(keeps_weights=keeps)
        assert (kept.executor is not None) == keeps
        engine = Engine.build(settings, reports.append, on_fault=faults.append, kept=kept)
        assert engine.counters() == before
        assert engine.canary.golden.digest == golden
        assert engine.load().num_free_blocks == engine.facts.num_blocks
        run(engine, "again")
        assert reports.cached() == 0  # the prefix cache is empty
        assert reports.tokens() == want
    engine.close()
    assert not faults


def test_what_was_computed_before_the_sleep_is_read_from_the_disk(tmp_path):
    model = make_model(tmp_path / "model", max_position_embeddings=512)
    disk = {"kv_disk_gb": 0.1, "kv_disk_path": str(tmp_path / "kv")}
    settings = EngineSettings(model=str(model), **SIZES, **disk)
    reports = Reports()
    engine = Engine.build(settings, reports.append)
    hashes = {"block_hashes": tuple(bytes([number]) * 16 for number in range(len(PROMPT) // 16))}
    run(engine, "first", **hashes)
    want = reports.tokens()
    for keeps in (True, False):
        kept = engine.leave(keeps_weights=keeps)
        engine = Engine.build(settings, reports.append, kept=kept)
        run(engine, "again", **hashes)
        assert reports.cached() >= 256
        assert reports.tokens() == want
    engine.close()


@pytest.mark.slow  # Triton's interpreter
def test_a_worker_that_cannot_free_its_cache_alone_frees_all(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    model = make_model(tmp_path / "model", num_hidden_layers=1, max_position_embeddings=64)
    sizes = {**SIZES, "num_gpu_blocks_override": 8, "canary_interval": 0.0}
    settings = EngineSettings(model=str(model), cpu_backend="triton", **sizes)
    reports = Reports()
    engine = Engine.build(settings, reports.append)
    kept = engine.leave(keeps_weights=True)
    assert kept.executor is None
    Engine.build(settings, reports.append, kept=kept).close()
