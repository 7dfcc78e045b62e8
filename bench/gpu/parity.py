"""Compares the GPU worker, with and without captured CUDA graphs, with PyTorch's operations in float32.

    python -m bench.gpu.parity MODEL_DIRECTORY [--device cuda] [--tokens 48]

Prompts of many lengths decode together, greedily. The outputs of two backends that round differently diverge where two
tokens are almost equally likely, and later tokens cannot be compared. So the check compares the log probabilities of
the tokens up to the first difference.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from antiphon.services.engine.backends.load import load_worker
from antiphon.services.engine.core.plan import CoreLimits
from antiphon.services.engine.core.request import SequenceSpec
from antiphon.services.engine.engine import Engine
from antiphon.services.engine.steps.loop import StepReport
from antiphon.shared.config import EngineSettings
from antiphon.shared.parameters.sampling import SamplingParams

LENGTHS = (3, 17, 64, 65, 130, 255, 256, 300)
MAX_MODEL_LEN = 512
TOLERANCE, OF_PYTORCH = 0.1, 1.5
"""Largest allowed difference of a log probability from float32: this, or this many times that of PyTorch's operations
in the model's dtype, if that is more. The difference grows with the number of layers."""
Said = dict[str, tuple[list[int], list[float]]]
"""Generated tokens and their log probabilities, by request."""


def said(options: argparse.Namespace, **flags: Any) -> Said:
    """Runs all prompts together on a worker with these flags, and returns the generated tokens."""
    fixed = {"model": str(options.model), "device": options.device, "max_num_seqs": len(LENGTHS)}
    worker = load_worker(EngineSettings(**fixed, max_model_len=MAX_MODEL_LEN, swap_space=0.0, **flags))
    answers: Said = {}

    def note(report: StepReport) -> None:
        for outcome in report.outcomes:
            tokens, logprobs = answers.setdefault(outcome.sequence_id, ([], []))
            tokens += outcome.token_ids
            logprobs += [each.logprob for each in outcome.logprobs]

    engine = Engine.of_worker(worker, CoreLimits(max_num_seqs=len(LENGTHS), max_num_batched_tokens=256), note)
    params = SamplingParams(max_tokens=options.tokens, temperature=0.0, ignore_eos=True, logprobs=0)
    for length in LENGTHS:
        draw = np.random.default_rng(length).integers(1, worker.facts().vocab_size, length)
        engine.add(SequenceSpec(sequence_id=str(length), prompt_token_ids=tuple(draw.tolist()), params=params))
    while engine.step():
        pass
    worker.close()
    return answers


def compare(ours: Said, theirs: Said) -> dict[str, Any]:
    """Returns the percentage of tokens before the first difference, and the largest difference of a log probability.

    Log probabilities are compared up to and including the first token that differs.
    """
    same, furthest = 0, 0.0
    for request, (tokens, logprobs) in ours.items():
        others, their_logprobs = theirs[request]
        parted = next((i for i, pair in enumerate(zip(tokens, others, strict=True)) if len(set(pair)) > 1), len(tokens))
        same += parted
        pairs = zip(logprobs[: parted + 1], their_logprobs[: parted + 1], strict=True)
        furthest = max([furthest, *(abs(one - other) for one, other in pairs)])
    total = sum(len(tokens) for tokens, _ in ours.values())
    return {"same_tokens_percent": round(100 * same / total, 1), "logprob_difference": round(furthest, 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, default=48)
    options = parser.parse_args()
    exact = said(options, cuda_backend="torch", dtype="float32")
    rounded = compare(said(options, cuda_backend="torch"), exact)
    found = {
        "graphs": compare(said(options), exact),
        "without graphs": compare(said(options, enforce_eager=True), exact),
        "PyTorch's operations": rounded,
    }
    allowed = max(TOLERANCE, OF_PYTORCH * rounded["logprob_difference"])
    wrong = [name for name, each in found.items() if each["logprob_difference"] > allowed]
    print(json.dumps({**found, "wrong": wrong}))


if __name__ == "__main__":
    main()
