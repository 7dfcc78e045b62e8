"""A process with a model that runs the largest steps that its flags allow. Run by `test_memory_limit`.

Prints, in bytes: the planned total, the anonymous memory at its peak, and the planned cache.
"""

import sys
from pathlib import Path

from antiphon.services.engine.backends.cpu.worker import CpuWorker
from antiphon.services.engine.backends.load import load_worker
from antiphon.services.engine.backends.torch.worker import TorchWorker
from antiphon.services.engine.core.plan import EngineFacts
from antiphon.services.engine.core.request import SequenceSpec
from antiphon.services.engine.engine import Engine, core_limits
from antiphon.services.engine.steps.loop import StepReport
from antiphon.services.engine.worker.capacity import memory
from antiphon.shared.config import EngineSettings
from antiphon.shared.parameters.sampling import SamplingParams


def main(model: str, backend: str, *flags: str) -> None:
    """`flags`: max_num_seqs, max_num_batched_tokens, chunked prefill, guesses."""
    num_seqs, num_tokens, chunked, num_draft_tokens = map(int, flags)
    settings = EngineSettings(
        model=model,
        device="cpu",
        cpu_backend=backend,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=num_tokens,
        enable_chunked_prefill=bool(chunked),
        use_lookahead=num_draft_tokens > 0,
        num_speculative_tokens=max(1, num_draft_tokens),
        kv_cache_memory_gb=0.2,
        swap_space=0.0,
        threads=1,
    )
    worker = load_worker(settings)
    assert isinstance(worker, CpuWorker if backend == "auto" else TorchWorker)
    file_bytes = status("RssFile")
    largest = worker.memory.held_bytes
    Path("/proc/self/clear_refs").write_text("5")
    engine = Engine.of_worker(worker, core_limits(settings, worker.facts()), _ignore)
    for index, spec in enumerate(specs(worker.facts(), num_seqs)):
        engine.add(spec(index))
    while engine.step():
        largest = max(largest, memory.held_bytes())
    assert engine.load().num_free_blocks == worker.facts().num_blocks
    # The system updates the peak and the current size in batches of their own, so either may be the larger by a little.
    peak = max(status("VmHWM") - file_bytes, largest)
    sizes = (worker.memory.total_bytes, peak, worker.memory.cache_bytes)
    sys.stdout.write(" ".join(map(str, sizes)))


def _ignore(report: StepReport) -> None:
    assert not report.refused


def specs(facts: EngineFacts, num_seqs: int):  # type: ignore[no-untyped-def]
    """One sequence as long as may be, short ones in all other rows, then as many again as fill the cache."""

    def make(length: int):  # type: ignore[no-untyped-def]
        params = SamplingParams(
            max_tokens=3,
            min_tokens=3,
            top_p=0.9,
            top_k=facts.vocab_size - 1,
            repetition_penalty=1.1,
            logprobs=20,
            prompt_logprobs=20,
        )
        # Every other token the same, so that there is something to guess from.
        return lambda index: SequenceSpec(
            sequence_id=f"s{index}",
            prompt_token_ids=tuple((7 * i + index) % facts.vocab_size if i % 2 else 1 for i in range(length)),
            params=params,
        )

    longest = min(facts.max_model_len, facts.num_blocks * facts.block_size) - 3
    fill = facts.num_blocks * facts.block_size // num_seqs
    yield make(longest)
    yield from [make(9)] * (num_seqs - 1)
    yield from [make(max(1, min(longest, fill) - 4))] * num_seqs


def status(name: str) -> int:
    """A line of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


if __name__ == "__main__":
    main(*sys.argv[1:])
