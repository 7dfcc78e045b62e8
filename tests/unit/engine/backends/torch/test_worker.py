import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from antiphon.services.engine.backends.load import choose_device, load_worker
from antiphon.services.engine.backends.torch.worker import TorchWorker
from antiphon.services.engine.core.plan import CoreLimits, NewSequence, ScheduledSequence, StepPlan
from antiphon.services.engine.executor import Executor
from antiphon.services.engine.warmup import warm_up
from antiphon.services.engine.worker.extras import check_offload
from antiphon.services.engine.worker.loading.model_files import describe_model, eos_token_ids, read_config
from antiphon.shared.config import EngineSettings
from antiphon.shared.errors import ServiceError
from antiphon.shared.flags import SettingsError
from antiphon.shared.parameters.sampling import SamplingParams

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def settings(directory: Path | str = "", **overrides: Any) -> EngineSettings:
    base = {"model": str(directory), "device": "cpu", "threads": 1, "block_size": 16, "kv_cache_memory_gb": 0.01}
    return EngineSettings(**{"max_num_seqs": 4, **base, **overrides})


@pytest.mark.spec("S-SRV-080:cpu", "S-SRV-081:cpu", "S-SRV-082:name")
def test_what_concerns_cuda_graphs_changes_nothing_on_a_cpu_and_says_so(
    checkpoint: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    directory = checkpoint()
    load_worker(settings(directory))
    assert "CUDA graphs" not in caplog.text
    load_worker(settings(directory, enforce_eager=True, max_seq_len_to_capture=64))
    assert "--enforce-eager changes nothing on a CPU" in caplog.text
    assert "--max-seq-len-to-capture changes nothing on a CPU" in caplog.text


def test_facts_say_what_loading_learnt(checkpoint: Callable[..., Path]) -> None:
    directory = checkpoint(eos_token_id=[1, 5])
    facts = load_worker(settings(directory, max_model_len=40)).facts()
    assert (facts.num_blocks, facts.block_size, facts.max_model_len, facts.vocab_size) == (12, 16, 40, 53)
    assert facts.eos_token_ids == {1, 5}


@pytest.mark.parametrize("where", ["added_tokens_decoder", "tokenizer.json"])
def test_end_tokens_come_from_both_configs_and_the_tokenizer(checkpoint: Callable[..., Path], where: str) -> None:
    directory = checkpoint(eos_token_id=1)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 3]}))
    facts: dict[str, Any] = {"eos_token": {"content": "<end>"}}
    added = [{"id": 7, "content": "<start>"}, {"id": 8, "content": "<end>"}]
    if where == "tokenizer.json":
        facts["eos_token"] = "<end>"
        (directory / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0}}, "added_tokens": added}))
    else:
        facts["added_tokens_decoder"] = {str(entry["id"]): entry for entry in added}
    (directory / "tokenizer_config.json").write_text(json.dumps(facts))
    assert eos_token_ids(directory, describe_model(directory)) == {1, 2, 3, 8}


@pytest.mark.parametrize("text", ["{", '{"added_tokens": [{"id": "seven"}]}'])
def test_a_broken_tokenizer_is_refused_by_name(checkpoint: Callable[..., Path], text: str) -> None:
    directory = checkpoint()
    (directory / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    (directory / "tokenizer.json").write_text(text)
    with pytest.raises(ServiceError, match=r"tokenizer\.json is not a tokenizer's file"):
        eos_token_ids(directory, describe_model(directory))


def test_a_directory_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ServiceError, match=r"it has no config\.json"):
        read_config(tmp_path)
    for text in ("{", "[]"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ServiceError, match=r"config\.json"):
            read_config(tmp_path)
    with pytest.raises(SettingsError, match="there is no directory"):
        load_worker(settings(tmp_path / "nowhere"))


def test_a_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == choose_device("cpu") == CPU
    with pytest.raises(ServiceError, match="no CUDA device"):
        choose_device("cuda")


@pytest.mark.spec("S-SRV-036")
def test_8_bits_hold_four_times_the_context_of_32(checkpoint: Callable[..., Path]) -> None:
    directory = checkpoint(max_position_embeddings=10**6)
    facts = [
        TorchWorker(settings(directory, kv_cache_dtype=kind, kv_cache_memory_gb=0.001), directory).facts()
        for kind in ("auto", "fp8")
    ]
    assert facts[1].num_blocks // facts[0].num_blocks == 4


@pytest.mark.spec("S-SRV-045")
def test_offloading_weights_changes_nothing_on_a_cpu_and_is_refused_where_pytorch_computes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level("INFO"):
        check_offload(EngineSettings(), CUDA)
        assert not caplog.text
        check_offload(EngineSettings(cpu_offload_gb=2.0), CPU)
    assert "--cpu-offload-gb changes nothing on a CPU" in caplog.text
    with pytest.raises(SettingsError, match="--cpu-offload-gb: 2 GiB of weights can be kept in host memory only where"):
        check_offload(EngineSettings(cpu_offload_gb=2.0), CUDA)


@pytest.mark.spec("S-SRV-061")
@pytest.mark.parametrize("chunked", [True, False])
def test_warming_up_prefills_and_decodes_and_leaves_no_trace(checkpoint: Callable[..., Path], chunked: bool) -> None:
    directory = checkpoint()
    share, join = ScheduledSequence(row=0, start=0, num_tokens=9, samples=True), joins(0, 9, (1,))
    plan = StepPlan(step=1, new=(join,), scheduled=(share,), num_tokens=9)
    fresh = TorchWorker(settings(directory), directory).run(plan)
    warm = TorchWorker(settings(directory), directory)
    assert (
        warm_up(
            Executor(warm),
            CoreLimits(max_num_seqs=4, max_num_batched_tokens=40 if chunked else 96, enable_chunked_prefill=chunked),
        )
        >= 3
    )
    assert warm.run(plan) == fresh


def joins(row: int, length: int, blocks: tuple[int, ...], **params: Any) -> NewSequence:
    tokens = tuple((row * 11 + 3 * i) % 53 for i in range(length))
    return NewSequence(
        row=row,
        sequence_id=f"r{row}",
        token_ids=tokens,
        num_prompt_tokens=length,
        block_ids=blocks,
        params=SamplingParams(temperature=0.0, **params),
    )


def test_results_are_in_plan_order_and_only_of_sequences_that_sample(checkpoint: Callable[..., Path]) -> None:
    directory = checkpoint()
    alone = []
    for row, length, blocks in ((3, 9, (4,)), (1, 5, (2,))):
        worker = TorchWorker(settings(directory), directory)
        share = ScheduledSequence(row=row, start=0, num_tokens=length, samples=True)
        plan = StepPlan(step=0, new=(joins(row, length, blocks),), scheduled=(share,), num_tokens=length)
        alone.append(worker.run(plan).token_ids[0])
    worker = TorchWorker(settings(directory), directory)
    new = (joins(3, 9, (4,), logprobs=2), joins(0, 8, (1,)), joins(1, 5, (2,)))
    shares = (
        ScheduledSequence(row=3, start=0, num_tokens=9, samples=True),
        ScheduledSequence(row=0, start=0, num_tokens=6, samples=False),
        ScheduledSequence(row=1, start=0, num_tokens=5, samples=True),
    )
    result = worker.run(StepPlan(step=7, new=new, scheduled=shares, num_tokens=20))
    assert result.step == 7
    assert list(result.token_ids) == alone
    assert [len(reports[0].top_token_ids) for reports in result.logprobs] == [2, 0]
    assert result.logprobs[0][0].top_token_ids[0] == alone[0][0]


def test_a_step_without_samples_or_without_sequences_gives_no_tokens(checkpoint: Callable[..., Path]) -> None:
    directory = checkpoint()
    worker = TorchWorker(settings(directory), directory)
    share = ScheduledSequence(row=0, start=0, num_tokens=4, samples=False)
    assert worker.run(StepPlan(step=0, new=(joins(0, 8, (1,)),), scheduled=(share,), num_tokens=4)).token_ids == ()
    assert worker.run(StepPlan(step=1, freed_rows=(0,))).token_ids == ()
    worker.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_type_runs(checkpoint: Callable[..., Path], dtype: str) -> None:
    directory = checkpoint()
    worker = TorchWorker(settings(directory, dtype=dtype), directory)
    share = ScheduledSequence(row=0, start=0, num_tokens=5, samples=True)
    result = worker.run(StepPlan(step=0, new=(joins(0, 5, (1,)),), scheduled=(share,), num_tokens=5))
    assert result.logprobs[0][0].logprob < 0
