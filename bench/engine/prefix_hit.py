"""What a prompt costs whose beginning was computed before, in one process, without bus, gateway or HTTP.

    python bench/engine/prefix_hit.py MODEL_DIRECTORY [--prefix 4000] [--others 32] [--tries 5] [--threads N]

Prompts have `prefix` tokens in common and then `others` of their own. The first is computed from its first token. With
recurrent states the second leaves a state where they part; from then on a prompt computes only its own tokens. Prints
the time until the first token of each, and of the last ones the quartiles as a share of the first.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from antiphon.services.engine.backends.load import load_worker  # noqa: E402
from antiphon.services.engine.core.core import Core  # noqa: E402
from antiphon.services.engine.core.plan import CoreLimits  # noqa: E402
from antiphon.services.engine.core.request import SequenceSpec  # noqa: E402
from antiphon.services.engine.worker.interface import ModelWorker  # noqa: E402
from antiphon.shared.config import EngineSettings  # noqa: E402
from antiphon.shared.parameters.sampling import SamplingParams  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description="The cost of a prompt whose beginning is cached.")
    parser.add_argument("model", type=Path)
    parser.add_argument("--prefix", type=int, default=4000)
    parser.add_argument("--others", type=int, default=32)
    parser.add_argument("--tries", type=int, default=5)
    parser.add_argument("--threads", type=int, default=0)
    options = parser.parse_args()
    length = options.prefix + options.others + 8
    settings = EngineSettings(
        model=str(options.model), threads=options.threads, max_num_seqs=4, max_model_len=length, kv_cache_memory_gb=4.0
    )
    worker = load_worker(settings)
    prompts, facts = make_prompts(options, worker.facts().vocab_size), worker.facts()
    core = Core(CoreLimits(max_num_seqs=4, max_num_batched_tokens=facts.step_tokens), facts)
    times = [first_token_s(core, worker, f"{number}", prompt) for number, prompt in enumerate(prompts)]
    print(f"{options.model.name}: {options.prefix} tokens in common and {options.others} others")
    print(f"first {times[0]:.3f} s, second {times[1]:.3f} s, state snapshots each {facts.state_interval} tokens")
    shares = [100 * seconds / times[0] for seconds in times[2:]]
    low, middle, high = statistics.quantiles(shares, n=4)
    print(
        f"then {middle:.2f} % of the first (quartiles {low:.2f} and {high:.2f}): {statistics.median(times[2:]):.4f} s"
    )
    worker.close()


def make_prompts(options: argparse.Namespace, vocab_size: int) -> list[list[int]]:
    """Returns prompts with the same beginning."""
    random = np.random.default_rng(0)
    prefix = random.integers(3, vocab_size, options.prefix).tolist()
    return [prefix + random.integers(3, vocab_size, options.others).tolist() for _ in range(options.tries + 2)]


def first_token_s(core: Core, worker: ModelWorker, name: str, prompt: list[int]) -> float:
    """Computes one token after a prompt, and returns the seconds that it took."""
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    core.add(SequenceSpec(sequence_id=name, prompt_token_ids=tuple(prompt), params=params))
    started = time.perf_counter()
    while core.sequences:
        plan = core.schedule()
        core.apply(plan, worker.run(plan))
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
