"""What the comparisons with transformers share: the models' variants, and an engine whose plans are kept."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from numpy.typing import NDArray

from antiphon.services.engine import engine as product
from antiphon.services.engine.backends.torch.worker import TorchWorker
from antiphon.services.engine.core.plan import CoreLimits, StepPlan, StepResult
from antiphon.services.engine.core.request import Outcome, SequenceSpec
from antiphon.services.engine.executor import Executor
from antiphon.services.engine.models.kv_groups import freeing_windows, num_groups
from antiphon.services.engine.models.registry import has_family
from antiphon.services.engine.steps.loop import StepReport
from antiphon.services.engine.worker.interface import ModelWorker
from antiphon.services.engine.worker.loading.model_files import describe_model, read_config
from antiphon.shared.config import EngineSettings
from antiphon.shared.parameters.sampling import SamplingParams
from tests.model_variants import MORE_FAMILY_VARIANTS, MORE_VARIANTS, TORCH_VARIANTS
from tests.models import VOCAB_SIZE
from tests.native.libraries import make_cpu_worker
from tests.support.kernels_on_gpu import COMPILED, KERNEL_DEVICE
from tests.support.slow import slow_but

if TYPE_CHECKING:
    from antiphon.services.engine.backends.triton.worker import TritonWorker

Models = Callable[[str], Path]
Reference = Callable[..., list[list[int]]]
"""(variant, prompts, answers): what transformers generates. The answers of a test are a draft, or left out."""
NUM_TOKENS = 20
BACKENDS = ("torch", "native")
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied, three layers": ("llama", {"tie_word_embeddings": True, "num_hidden_layers": 3}),
    "llama without groups": ("llama", {"num_key_value_heads": 4}),
    "llama with one key head": ("llama", {"num_key_value_heads": 1}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama with its own head size": ("llama", {"head_dim": 24}),
    "llama, linear positions": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}},
    ),
    "llama, llama3 positions": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "llama, yarn positions": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "llama, dynamic positions": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}},
    ),
    "mistral": ("mistral", {}),
    "mistral with a window": ("mistral", {"sliding_window": 23}),
    "mistral with a window of one block": ("mistral", {"sliding_window": 16, "num_key_value_heads": 4}),
    "qwen2": ("qwen2", {}),
    "qwen2 tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2, a window in some layers": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1, "num_hidden_layers": 3},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3 tied, with biases": ("qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
}
VARIANTS.update(MORE_VARIANTS)
FAMILY_VARIANTS = ("llama", "mistral with a window", "qwen2", "qwen3", *MORE_FAMILY_VARIANTS)
CACHE_VARIANTS = (
    "llama",
    "mistral with a window",
    "gemma2",
    "gpt2",
    "gpt_oss",
    "falcon with biases for positions",
    "qwen3 with experts",
    "deepseek_v2",
    "deepseek_v3 with wide latents",
    "youtu",
    "chatglm",
    "cohere",
    "lfm2",
    "qwen3_5",
    "laguna",
    "llama4",
    "bamba",
    "gemma3n",
    "gemma4",
    "gemma4 with layers that share keys",
    "falcon_h1",
    "mamba",
    "jamba",
)
"""One for each way in which attention reads the cache, of the forms in which it is written and of what positions are
in it. For tests of a single feature of the cache; the test of everything at once has all families.
"""
QUICK_VARIANTS = (
    "llama",
    "mistral with a window",
    "qwen3",
    "gemma2",
    "gpt_oss",
    "qwen3 with experts",
    "deepseek_v2",
    "lfm2",
    "qwen3_5",
    "gemma4 with layers that share keys",
    "mamba",
)
"""One for each kind of cache that most models have, with which `make test` tries everything; `make slow-test` has the
others."""
RECURRENT_VARIANTS = ("lfm2", "qwen3_5", "bamba", "falcon_h1", "mamba", "jamba")
"""Those of them with a recurrent state, without which swapped keys and values would be of no use."""


ON_GPU: dict[str, Any] = {
    "device": "cuda",
    "dtype": "float32",
    # Other tests use the GPU at the same time.
    "gpu_memory_utilization": 0.99,
    "num_gpu_blocks_override": 256,
}
"""Settings with which a worker on a GPU computes what one on a CPU does."""


def settings(directory: Path, **overrides: Any) -> EngineSettings:
    return EngineSettings(
        **{
            "model": str(directory),
            "device": "cpu",
            "threads": 1,
            "kv_cache_memory_gb": 0.05,
            "block_size": 16,
            **(ON_GPU if COMPILED else {}),
            **overrides,
        }
    )


def few_blocks(directory: Path, count: int) -> int:
    """Returns how many blocks have room for as many tokens as `count` blocks of a model without groups of layers."""
    grouped = has_family(read_config(directory))
    return count * num_groups(freeing_windows(describe_model(directory))) if grouped else count


def make_prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([length, seed]).integers(3, VOCAB_SIZE, length).tolist()


def greedy(num_tokens: int = NUM_TOKENS) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)


def pairs_of(variants: Iterable[str]) -> list[tuple[str, str]]:
    """(backend, variant) for every backend that serves the variant."""
    return [
        (backend, variant)
        for variant in variants
        for backend in BACKENDS
        if backend == "torch" or variant not in TORCH_VARIANTS
    ]


def on_both(variants: Iterable[str], *more: Any, every: bool = False) -> list[Any]:
    """(backend, variant, *more) for every backend that serves the variant, as parameters of a test.

    Those of variants that are not among `QUICK_VARIANTS` are slow. `every`: all variants are quick on one backend.
    """

    def is_quick(backend: str, variant: str) -> bool:
        first = "torch" if variant in TORCH_VARIANTS else "native"
        return variant in QUICK_VARIANTS or (every and backend == first)

    return [
        pytest.param(*pair, *more, marks=() if is_quick(*pair) else pytest.mark.slow) for pair in pairs_of(variants)
    ]


def quick_or_slow(variants: Iterable[str]) -> list[Any]:
    """The variants, as parameters of a test; those that are not among `QUICK_VARIANTS` are slow."""
    return slow_but(QUICK_VARIANTS, variants)


def make_kernel_worker(directory: Path, **overrides: Any) -> "TritonWorker":
    """The GPU worker, under Triton's interpreter or on a GPU that other tests use too."""
    # Imported here because not every suite needs Triton.
    from antiphon.services.engine.backends.triton.worker import TritonWorker

    # Measured on a GPU that other tests use, times would mean nothing.
    usual = {} if overrides.get("deterministic") else {"gpu_kernels": "reference"}
    chosen = settings(directory, **{**usual, **overrides})
    return TritonWorker(chosen, directory, KERNEL_DEVICE)


def make_worker(backend: str, directory: Path, **overrides: Any) -> ModelWorker:
    """`torch`, `triton`, `native` or the name of an instruction set."""
    if backend == "triton":
        return make_kernel_worker(directory, **overrides)
    chosen = settings(directory, **overrides)
    if backend == "torch":
        return TorchWorker(chosen, directory, KERNEL_DEVICE)
    return make_cpu_worker(directory, chosen, *(() if backend == "native" else (backend,)))


class _Recorder:
    """A worker that keeps the plans it is given and computes each before the next is made."""

    def __init__(self, worker: ModelWorker) -> None:
        self.plans: list[StepPlan] = []
        self.facts, self.close = worker.facts, worker.close
        self._worker = worker

    def run(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        return self._worker.run(plan)


class _NoClock:
    """Time that does not pass: whether to guess tokens must not depend on how fast this machine is."""

    def monotonic(self) -> float:
        return 0.0

    def time_ns(self) -> int:
        return 0


class Engine:
    """The product's engine around a worker, stepped by hand."""

    def __init__(self, directory: Path, limits: CoreLimits, backend: str = "torch", **overrides: Any) -> None:
        self._start(make_worker(backend, directory, max_num_seqs=limits.max_num_seqs, **overrides), limits)

    @classmethod
    def around(cls, worker: ModelWorker, limits: CoreLimits) -> "Engine":
        """A core that starts anew with a worker that has computed before."""
        engine = cls.__new__(cls)
        engine._start(worker, limits)
        return engine

    def _start(self, worker: ModelWorker, limits: CoreLimits) -> None:
        recorder = _Recorder(worker)
        self.worker, self.plans = worker, recorder.plans
        self._reports: list[StepReport] = []
        self._engine = product.Engine(Executor(recorder), limits, self._reports.append, clock=_NoClock())
        self.core = self._engine._core
        self.cached: dict[str, int] = {}

    def step(self) -> list[Outcome]:
        """One step; what it gave."""
        self._reports.clear()
        self._engine.step()
        return [outcome for report in self._reports for outcome in report.outcomes]

    def generate(self, prompts: list[list[int]], params: SamplingParams | None = None) -> list[list[int]]:
        output: dict[str, list[int]] = {f"{len(self.plans)}-{i}": [] for i in range(len(prompts))}
        for sequence_id, prompt in zip(output, prompts, strict=True):
            self.core.add(
                SequenceSpec(sequence_id=sequence_id, prompt_token_ids=tuple(prompt), params=params or greedy())
            )
        while any(sequence_id in self.core for sequence_id in output):
            for outcome in self.step():
                output[outcome.sequence_id] += outcome.token_ids
                self.cached[outcome.sequence_id] = outcome.num_cached_tokens
        return list(output.values())

    def log_probabilities(self, prompts: list[list[int]], num_tokens: int) -> list[NDArray[np.float64]]:
        """Of every token after each greedy step, [num_tokens, vocab] for each prompt."""
        vocab_size = self.worker.facts().vocab_size
        params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True, logprobs=vocab_size)
        rows: dict[str, list[NDArray[np.float64]]] = {f"p{i}": [] for i in range(len(prompts))}
        for sequence_id, prompt in zip(rows, prompts, strict=True):
            self.core.add(SequenceSpec(sequence_id=sequence_id, prompt_token_ids=tuple(prompt), params=params))
        while self.core.sequences:
            for outcome in self.step():
                for report in outcome.logprobs:
                    row = np.full(vocab_size, np.nan)
                    row[list(report.top_token_ids)] = report.top_logprobs
                    rows[outcome.sequence_id].append(row)
        return [np.stack(each) for each in rows.values()]
