"""What it costs to verify a receipt, in comparison with generating its output, in one process.

    python -m bench.receipts MODEL_DIR [--tokens 512] [--threads 2] [--rounds 3]

Generates an output, then has the checker of `antiphon verify` check it, as it is and with a false token in the
middle; greedy, sampled and with penalties. Loading the model is not counted: a day's receipts are checked with one.
"""

import argparse
import json
import random
import time
from collections.abc import Callable
from typing import Any, TypeVar

from antiphon.receipts.checker import Checker, ExpectedOutput
from antiphon.shared.parameters.sampling import SamplingParams

T = TypeVar("T")
PROMPT_TOKENS = 128
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.8, "top_p": 0.95},
    "penalties": {"temperature": 0.8, "presence_penalty": 0.5, "repetition_penalty": 1.1},
}


def main() -> None:
    """Prints one line of JSON for each kind of sampling: seconds and ratios, the best of the rounds.

    With `--cpu` the seconds are those of this process on its processors, which other processes change less.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cpu", action="store_true", help="processor time; with --threads 1, for a busy machine")
    options = parser.parse_args()
    clock = time.process_time if options.cpu else time.perf_counter
    # Without a prefix cache, verifying computes the prompt, too.
    checker = Checker(options.model, threads=options.threads, kv_cache_memory_gb=1.0, enable_prefix_caching=False)
    vocab_size = checker.engine.facts.vocab_size
    for kind, fields in KINDS.items():
        params = SamplingParams(max_tokens=options.tokens, seed=7, ignore_eos=True, **fields)
        generate_s: list[float] = []
        verify_s: list[float] = []
        false_s: list[float] = []
        for number in range(options.rounds):
            draw = random.Random(f"{kind} {number}")
            prompt = [draw.randrange(1000, vocab_size // 2) for _ in range(PROMPT_TOKENS)]
            plain = ExpectedOutput(prompt_token_ids=prompt, params=params, token_ids=None)
            [made], took_s = timed(lambda one=plain: checker.check([one]), clock)
            generate_s.append(took_s)
            known = ExpectedOutput(prompt_token_ids=prompt, params=params, token_ids=made.token_ids)
            [found], took_s = timed(lambda one=known: checker.check([one]), clock)
            assert not found.differences, found.differences
            verify_s.append(took_s)
            middle = options.tokens // 2
            false = [*made.token_ids[:middle], (made.token_ids[middle] + 1) % vocab_size, *made.token_ids[middle + 1 :]]
            known = ExpectedOutput(prompt_token_ids=prompt, params=params, token_ids=false)
            [found], took_s = timed(lambda one=known: checker.check([one]), clock)
            assert [one.position for one in found.differences] == [middle]
            false_s.append(took_s)
        best = min(generate_s), min(verify_s), min(false_s)
        told = {"kind": kind, "tokens": options.tokens, "prompt_tokens": PROMPT_TOKENS, "threads": options.threads}
        told |= {"generate_s": round(best[0], 3), "verify_s": round(best[1], 3), "false_s": round(best[2], 3)}
        print(json.dumps({**told, "verify_share": round(best[1] / best[0], 3)}), flush=True)
    checker.close()


def timed(work: Callable[[], T], clock: Callable[[], float]) -> tuple[T, float]:
    """Returns a result, and the seconds that it took by a clock."""
    started_s = clock()
    result = work()
    return result, clock() - started_s


if __name__ == "__main__":
    main()
