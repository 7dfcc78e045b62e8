"""`make structured`: many outputs of a random model against their structure, and a corpus of JSON Schemas.

    python -m tests.structured.run [SUITE …] [--outputs 2000] [--pairs 2000] [--seed 1] [--json FILE]

SUITE is a directory of a draft of JSON-Schema-Test-Suite, such as `tests/draft2020-12` of a clone of
https://github.com/json-schema-org/JSON-Schema-Test-Suite. The exit code is 1 if an output does not have its structure,
if a drawn instance is not taken, or if an instance is taken that the suite calls invalid. Valid instances that are not
taken are listed: those of `format`, which the suite takes for an annotation, are refused on purpose.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from antiphon import LLM
from tests.models import make_model
from tests.structured import corpus, outputs


def main() -> int:
    """Runs all checks, prints what was found, and writes it to a file if asked to."""
    options = parse()
    started = time.monotonic()
    results: dict[str, Any] = {"seed": options.seed, "outputs": options.outputs, "pairs": options.pairs}
    with tempfile.TemporaryDirectory() as directory:
        model = str(make_model(Path(directory), max_position_embeddings=4096))
        with LLM(model, dtype="float32", kv_cache_memory_gb=0.1, threads=1) as llm:
            results["wrong_outputs"] = outputs.wrong_outputs(llm, options.outputs, options.seed)
    results["pairs_not_taken"] = pairs_not_taken(options.pairs, options.seed)
    tokenizer = corpus.demo_tokenizer()
    results["suites"] = {}
    for suite in options.suites:
        if not suite.is_dir():
            raise SystemExit(f"{suite} is not a directory: clone JSON-Schema-Test-Suite and name one of its drafts")
        found = corpus.of_directory(suite, tokenizer)
        results["suites"][suite.name] = {name: getattr(found, name) for name in found.__dataclass_fields__}
    results["seconds"] = round(time.monotonic() - started, 1)
    text = json.dumps(results, indent=1, ensure_ascii=False) + "\n"
    sys.stdout.write(text)
    if options.json is not None:
        options.json.write_text(text, encoding="utf-8")
    wrong = [one for suite in results["suites"].values() for one in suite["wrongly_taken"]]
    return int(bool(results["wrong_outputs"] or results["pairs_not_taken"] or wrong))


def parse() -> argparse.Namespace:
    """Parses the command-line options."""
    parser = argparse.ArgumentParser(description="Proofs of structured output.")
    parser.add_argument("suites", nargs="*", type=Path, metavar="SUITE")
    parser.add_argument("--outputs", type=int, default=2000, help="of the random model, a quarter of each kind")
    parser.add_argument("--pairs", type=int, default=2000, help="random schemas, each with a valid instance")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="file for the results")
    return parser.parse_args()


def pairs_not_taken(count: int, seed: int) -> list[str]:
    """Returns drawn schemas with an instance that is valid and not taken token by token in each of its layouts."""
    chance, tokenizer, found = random.Random(seed), corpus.demo_tokenizer(), list[str]()
    for _ in range(count):
        schema, value = corpus.drawn(chance)
        start = corpus.start_of(schema, tokenizer)
        if start is None or not all(corpus.takes(start, text) for text in corpus.layouts(value)):
            found.append(json.dumps([schema, value], ensure_ascii=False))
    return found


if __name__ == "__main__":
    sys.exit(main())
