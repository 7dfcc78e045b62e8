"""Results of the engine in bfloat16, on the trained demo model and on small models of each kind.

    against float32   teacher-forced: the distributions of a text's tokens with the kernels in bfloat16, against
                      PyTorch's operations in float32 with the same weights. The text is computed in one step, in which
                      the prefill kernel attends, and a token at a time, in which the decode kernel does
    graphs            the same bits with captured graphs and without

The distance of two distributions is the Kullback-Leibler divergence of ours from that in float32, in nats. A mask that
is off by one token moves the first tokens by more than `KL_MAX`.
"""

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from antiphon.services.engine.backends.load import load_worker
from antiphon.services.engine.core.plan import CoreLimits
from antiphon.services.engine.core.request import SequenceSpec
from antiphon.services.engine.engine import Engine
from antiphon.services.engine.steps.loop import StepReport
from antiphon.services.engine.worker.interface import ModelWorker
from antiphon.shared.config import EngineSettings
from antiphon.shared.messages import PromptLogprobs
from antiphon.shared.parameters.sampling import SamplingParams
from bench.gpu.models import KINDS, make
from bench.gpu.parts import DEVICE, Found, Given, compute_parts
from bench.gpu.timing import rounded

DEMO = Path(__file__).resolve().parents[2] / "antiphon" / "demo"
TEXT = (
    "<|im_start|>user\nTell me a story.<|im_end|>\n<|im_start|>assistant\nOnce upon a time there was a small boat on a "
    "wide lake. Every morning it left the shore with the wind, and every evening it came back before it was dark."
)
KL_MEAN_MAX, KL_MAX = 0.002, 0.02
"""Largest mean over the tokens of a text, and largest of a token."""
_SMALL_TOKENS, _TINY_TOKENS = 96, 12
_LENGTHS, _GENERATED = (3, 17, 64, 65, 130), 24
Distributions = NDArray[np.float32]
"""Log probabilities [tokens, vocabulary], after each token of a text but the last."""


def worker_of(directory: Path, **flags: Any) -> ModelWorker:
    """Returns a worker with the kernels, or with `cuda_backend="torch"` with PyTorch's operations."""
    backend = flags.pop("backend", "triton")
    chosen: dict[str, Any] = {"cuda_backend": "torch" if backend == "torch" else "auto"}
    if DEVICE.type == "cpu":
        chosen = {"cpu_backend": backend}
    settings = EngineSettings(
        model=str(directory),
        load_format="auto" if (directory / "model.safetensors").exists() else "dummy",
        device=DEVICE.type,
        max_num_seqs=8,
        max_model_len=512,
        num_gpu_blocks_override=64,
        swap_space=0.0,
        # Measuring the forms of products would take most of the time; `kernels` compares all of them.
        gpu_kernels="reference",
        **chosen,
        **flags,
    )
    return load_worker(settings)


def distributions(worker: ModelWorker, tokens: Sequence[int], budget: int) -> Distributions:
    """Returns the distributions of a text, of which a step computes `budget` tokens."""
    parts: list[PromptLogprobs] = []

    def note(report: StepReport) -> None:
        assert not report.refused, report.refused
        parts.extend(part for outcome in report.outcomes for part in outcome.prompt_logprobs if part.start)

    vocab = worker.facts().vocab_size
    limits = CoreLimits(max_num_seqs=1, max_num_batched_tokens=budget, enable_prefix_caching=False)
    engine = Engine.of_worker(worker, limits, note)
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, prompt_logprobs=vocab)
    engine.add(SequenceSpec(sequence_id="text", prompt_token_ids=tuple(tokens), params=params))
    while engine.step():
        pass
    found = np.full((len(tokens) - 1, vocab), np.nan, dtype=np.float32)
    for part in parts:
        ids = np.frombuffer(part.top_token_ids, "<u4").reshape(-1, part.num_top)
        values = np.frombuffer(part.top_logprobs, "<f4").reshape(-1, part.num_top)
        np.put_along_axis(found[part.start - 1 : part.start - 1 + len(ids)], ids.astype(np.int64), values, axis=1)
    return found


def divergence(exact: Distributions, ours: Distributions) -> NDArray[np.float64]:
    """Returns the divergence of each token, [tokens]; NaN where a log probability is missing."""
    wide = exact.astype(np.float64)
    return (np.exp(wide) * (wide - ours)).sum(axis=1)


def told(divergences: NDArray[np.float64]) -> Found:
    """Returns the mean and the largest divergence, and whether they are too large."""
    mean, largest = float(divergences.mean()), float(divergences.max())
    # Also true of NaN.
    return {"mean": rounded(mean), "max": rounded(largest), "wrong": not (mean <= KL_MEAN_MAX and largest <= KL_MAX)}


def models(given: Given, scratch: Path) -> Mapping[str, tuple[Path, list[int]]]:
    """Returns for each model its directory and the tokens of a text."""
    count = _TINY_TOKENS if given.tiny else _SMALL_TOKENS
    every = {"demo": (DEMO, _demo_tokens()[: 2 * count])}
    for kind in KINDS:
        directory = make(kind, scratch, tiny=given.tiny)
        vocab = json.loads((directory / "config.json").read_text())["vocab_size"]
        every[kind] = directory, np.random.default_rng(5).integers(1, vocab, count).tolist()
    return every


def _demo_tokens() -> list[int]:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(DEMO / "tokenizer.json")).encode(TEXT).ids


def against_float32(given: Given) -> Found:
    """Returns by model the divergences of the kernels, and of PyTorch's operations in bfloat16 for comparison."""
    found: Found = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name, (directory, tokens) in models(given, Path(scratch)).items():
            budget = max(len(tokens), 8)
            exact = _distributions(directory, tokens, (budget,), backend="torch", dtype="float32")[0]
            ours = _distributions(directory, tokens, (budget, 1), dtype="bfloat16")
            theirs = _distributions(directory, tokens, (budget,), backend="torch", dtype="bfloat16")[0]
            found[name] = {
                "prefill": told(divergence(exact, ours[0])),
                "decode": told(divergence(exact, ours[1])),
                "PyTorch's operations": told(divergence(exact, theirs)),
            }
    ours = ("prefill", "decode")
    wrong = [f"{name}, {way}" for name, each in found.items() for way in ours if each[way]["wrong"]]
    return {**found, "wrong": wrong}


def _distributions(directory: Path, tokens: Sequence[int], budgets: Sequence[int], **flags: Any) -> list[Distributions]:
    worker = worker_of(directory, **flags)
    try:
        return [distributions(worker, tokens, budget) for budget in budgets]
    finally:
        worker.close()


def graphs(given: Given) -> Found:
    """Returns the models whose tokens or log probabilities differ between graphs and launches one by one."""
    wrong: list[str] = []
    found: Found = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name, (directory, _) in models(given, Path(scratch)).items():
            lengths, count = (_LENGTHS[:2], 3) if given.tiny else (_LENGTHS, _GENERATED)
            said = [generated(directory, lengths, count, enforce_eager=eager) for eager in (False, True)]
            found[name] = "equal" if said[0] == said[1] else "different"
            wrong += [name] if said[0] != said[1] else []
    return {**found, "wrong": wrong}


def generated(directory: Path, lengths: Sequence[int], count: int, **flags: Any) -> dict[str, list[tuple[int, float]]]:
    """Returns the tokens and their log probabilities of random prompts, all decoded together, in bfloat16."""
    worker = worker_of(directory, dtype="bfloat16", **flags)
    answers: dict[str, list[tuple[int, float]]] = {}

    def note(report: StepReport) -> None:
        for outcome in report.outcomes:
            pairs = zip(outcome.token_ids, (each.logprob for each in outcome.logprobs), strict=True)
            answers.setdefault(outcome.sequence_id, []).extend(pairs)

    engine = Engine.of_worker(worker, CoreLimits(max_num_seqs=8, max_num_batched_tokens=256), note)
    params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True, logprobs=0)
    for length in lengths:
        prompt = tuple(np.random.default_rng(length).integers(1, worker.facts().vocab_size, length).tolist())
        engine.add(SequenceSpec(sequence_id=str(length), prompt_token_ids=prompt, params=params))
    while engine.step():
        pass
    worker.close()
    return answers


PARTS = {"bfloat16 against float32": against_float32, "graphs against launches": graphs}

if __name__ == "__main__":
    compute_parts(PARTS)
