"""Which backend an engine on a CPU gets: the compiled one where it can be had and serves the model, or torch's."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from antiphon.services.engine.backends.cpu import worker as cpu_worker
from antiphon.services.engine.backends.cpu.answer import address
from antiphon.services.engine.backends.cpu.compile import CompileError, find_compiler
from antiphon.services.engine.backends.cpu.worker import CpuWorker, cannot_serve
from antiphon.services.engine.backends.load import load_worker
from antiphon.services.engine.backends.torch.worker import TorchWorker
from antiphon.services.engine.core.plan import NewSequence, ScheduledSequence, StepPlan
from antiphon.services.engine.worker.capacity.memory import HeapGuard
from antiphon.shared.config import EngineSettings
from antiphon.shared.parameters.sampling import SamplingParams


def settings(directory: Path, **overrides: Any) -> EngineSettings:
    base = {"model": str(directory), "device": "cpu", "threads": 1, "kv_cache_memory_gb": 0.01, "max_num_seqs": 4}
    return EngineSettings(**{**base, **overrides})


def first_step(temperature: float = 0.0, copies: tuple[tuple[int, int], ...] = ()) -> StepPlan:
    params = SamplingParams(temperature=temperature, seed=1)
    joining = NewSequence(
        row=0, sequence_id="a", token_ids=(1, 2, 3), num_prompt_tokens=3, block_ids=(0,), params=params
    )
    return StepPlan(
        step=1,
        new=(joining,),
        scheduled=(ScheduledSequence(row=0, start=0, num_tokens=3, samples=True),),
        copies=copies,
        num_tokens=3,
    )


@pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler: g++ or clang++")
def test_the_compiled_backend_is_the_default_and_torch_can_be_asked_for(checkpoint: Callable[..., Path]) -> None:
    directory = checkpoint()
    worker = load_worker(settings(directory))
    assert isinstance(worker, CpuWorker)
    assert worker.facts().step_prompt_tokens in (512, 1024)
    worker.close()
    other = load_worker(settings(directory, cpu_backend="torch"))
    assert isinstance(other, TorchWorker)
    assert other.facts().step_prompt_tokens is None


@pytest.mark.parametrize("failure", [CompileError("there is no C++ compiler"), OSError("failed to map segment")])
def test_where_the_library_cannot_be_had_torch_computes_and_a_notice_says_why(
    failure: Exception,
    checkpoint: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(cache: str) -> None:
        raise failure

    monkeypatch.setattr(cpu_worker, "load_library", fail)
    assert isinstance(load_worker(settings(checkpoint())), TorchWorker)
    assert f"the fast CPU backend is not used: {failure}. PyTorch's operations compute instead" in caplog.text


@pytest.mark.parametrize(
    ("fields", "overrides", "reason"),
    [
        ({}, {}, None),
        ({}, {"dtype": "float32"}, None),
        ({}, {"dtype": "float16"}, "it has no --dtype float16"),
        ({}, {"kv_cache_dtype": "fp8"}, None),
        ({}, {"kv_cache_dtype": "fp8_e5m2", "dtype": "float32"}, None),
        ({"head_dim": 578}, {}, "heads have more than 576 dimensions"),
        ({"architectures": ["CohereForCausalLM"]}, {}, "runs through transformers"),
    ],
)
def test_what_the_compiled_backend_does_not_serve(
    fields: dict[str, Any], overrides: dict[str, Any], reason: str | None, checkpoint: Callable[..., Path]
) -> None:
    directory = checkpoint(**{name: value for name, value in fields.items() if name != "architectures"})
    if "architectures" in fields:
        config = directory / "config.json"
        config.write_text(config.read_text().replace("Qwen3ForCausalLM", *fields["architectures"]))
    found = cannot_serve(settings(directory, **overrides), directory)
    assert found is None if reason is None else reason in (found or "")


@pytest.mark.spec("S-SRV-036")
@pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler: g++ or clang++")
def test_a_cache_of_8_bits_has_twice_the_blocks_of_one_of_16(checkpoint: Callable[..., Path]) -> None:
    directory, blocks = checkpoint(max_position_embeddings=10**6), list[int]()
    for kind in ("auto", "fp8"):
        chosen = settings(directory, kv_cache_dtype=kind, kv_cache_memory_gb=0.001, dtype="bfloat16")
        worker = load_worker(chosen)
        assert isinstance(worker, CpuWorker)
        blocks.append(worker.facts().num_blocks)
        worker.close()
    assert blocks[1] // blocks[0] == 2


@pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler: g++ or clang++")
@pytest.mark.parametrize(
    ("temperature", "copies", "looks"),
    [(0.0, (), 0), (0.0, ((0, 1),), 1), (1.0, (), 1)],
    ids=["library", "copy", "draw"],
)
def test_the_heap_is_looked_at_after_steps_that_use_it(
    temperature: float,
    copies: tuple[tuple[int, int], ...],
    looks: int,
    checkpoint: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[HeapGuard] = []
    monkeypatch.setattr(HeapGuard, "after_step", lambda guard: seen.append(guard))
    worker = load_worker(settings(checkpoint()))
    assert isinstance(worker, CpuWorker)
    seen.clear()
    worker.run(first_step(temperature, copies))
    worker.close()
    assert len(seen) == looks


@pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler: g++ or clang++")
@pytest.mark.parametrize("threads", [1, 3])
def test_threads_with_nothing_to_do_end_up_asleep(threads: int, checkpoint: Callable[..., Path]) -> None:
    worker = load_worker(settings(checkpoint(), threads=threads))
    worker.run(first_step())
    used, deadline = 0.5, time.monotonic() + 30
    while used >= 0.2:
        assert time.monotonic() < deadline
        before = time.process_time()
        time.sleep(0.5)
        used = time.process_time() - before
    later = worker.run(
        StepPlan(step=2, scheduled=(ScheduledSequence(row=0, start=3, num_tokens=1, samples=True),), num_tokens=1)
    )
    assert len(later.token_ids) == 1
    worker.close()


def test_the_address_of_an_array_is_that_of_its_first_element_and_there_is_none_with_gaps() -> None:
    array = np.arange(12).reshape(3, 4)
    assert address(array[1]) == array.ctypes.data + 4 * array.itemsize
    assert address(np.empty((0, 4)))
    with pytest.raises(TypeError, match="contiguous"):
        address(array[:, 1])
