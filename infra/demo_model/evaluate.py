"""Measures a model: accuracy per task on held-out instances, perplexity on unseen text.

``accuracy`` and ``perplexity`` take callables, so that the same code measures any engine or quantized model. Run by
hand (``python -m infra.demo_model.evaluate --json``) and imported by benches.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import torch

from infra.demo_model.exercises.tasks import draw, task_names
from infra.demo_model.exercises.tasks_tools import TOOL_TASKS
from infra.demo_model.generate import GenerateFn, LogprobFn, decoder
from infra.demo_model.sample import Expect, Message, Sample, Tool, passes, read_call, user
from infra.demo_model.texts.corpus import long_text
from infra.demo_model.texts.newcomers import CONVERSATIONS, FIRST_PROMPTS
from infra.demo_model.texts.stories import story
from infra.demo_model.tokenizer import DEMO

EncodeFn = Callable[[str], Sequence[int]]
#: Like ``GenerateFn``, with the tools offered in each conversation.
ToolGenerateFn = Callable[[Sequence[Sequence[Message]], Sequence[Sequence[Tool]]], list[str]]

#: A separate seed: training draws from streams named "<seed>/<step>".
_SEED = "held out"


def held_out(per_task: int = 50, names: Sequence[str] | None = None) -> list[Sample]:
    """Held-out instances, the same on every call; duplicates within a task are dropped."""
    found: list[Sample] = []
    for name in names or task_names():
        rng = Random(f"{_SEED}/{name}")
        drawn = {
            sample.messages[-1]["content"]: sample for sample in (draw(name, rng, "held out") for _ in range(per_task))
        }
        found += drawn.values()
    return found


def accuracy(
    generate_fn: GenerateFn, per_task: int = 50, names: Sequence[str] | None = None
) -> dict[str, tuple[int, int]]:
    """Numbers of right answers and of instances per task; ``generate_fn`` should decode greedily."""
    samples = held_out(per_task, names)
    answers = generate_fn([sample.messages for sample in samples])
    table: dict[str, tuple[int, int]] = {}
    for sample, answer in zip(samples, answers, strict=True):
        right, total = table.get(sample.task, (0, 0))
        table[sample.task] = (right + passes(sample.judged_by, answer), total + 1)
    return table


def failures(
    generate_fn: GenerateFn, per_task: int = 50, names: Sequence[str] | None = None
) -> list[tuple[Sample, str]]:
    """The held-out instances that were answered wrongly, with the answers."""
    samples = held_out(per_task, names)
    answers = generate_fn([sample.messages for sample in samples])
    return [pair for pair in zip(samples, answers, strict=True) if not passes(pair[0].judged_by, pair[1])]


def tool_samples(per_task: int = 50) -> list[Sample]:
    """Held-out instances of the tasks with tools; the same on every call."""
    found: list[Sample] = []
    for name, make in TOOL_TASKS.items():
        rng = Random(f"{_SEED}/{name}")
        found += [replace(make(rng, "held out"), task=name) for _ in range(per_task)]
    return found


def tool_accuracy(generate_fn: ToolGenerateFn, per_task: int = 50) -> dict[str, dict[str, int]]:
    """For each task with tools: numbers of instances and right answers; for calls also the number of right parts."""
    samples = tool_samples(per_task)
    answers = generate_fn([sample.messages for sample in samples], [sample.tools for sample in samples])
    table: dict[str, dict[str, int]] = {}
    for sample, answer in zip(samples, answers, strict=True):
        counts = table.setdefault(sample.task, {"of": 0, "right": 0})
        found = {"of": 1, "right": int(passes(sample.judged_by, answer))}
        if sample.judged_by.kind == "call":
            found |= _call_counts(answer, json.loads(sample.judged_by.gold[0]))
        for name, value in found.items():
            counts[name] = counts.get(name, 0) + value
    return table


def tool_failures(generate_fn: ToolGenerateFn, per_task: int = 50) -> list[tuple[Sample, str]]:
    """The held-out instances with tools that were answered wrongly, with the answers."""
    samples = tool_samples(per_task)
    answers = generate_fn([sample.messages for sample in samples], [sample.tools for sample in samples])
    return [pair for pair in zip(samples, answers, strict=True) if not passes(pair[0].judged_by, pair[1])]


def _call_counts(answer: str, wanted: Tool) -> dict[str, int]:
    call = read_call(answer)
    return {
        "well-formed": int(call is not None),
        "right name": int(call is not None and call["name"] == wanted["name"]),
        "right arguments": int(call is not None and call["arguments"] == wanted["arguments"]),
    }


def _newcomer_cases() -> list[tuple[Sequence[Message], Expect]]:
    return [*(((user(text),), expect) for text, expect in FIRST_PROMPTS), *CONVERSATIONS]


def newcomers(generate_fn: GenerateFn) -> list[tuple[str, str, bool]]:
    """The hand-written prompts: last message, answer, and whether it is right."""
    cases = _newcomer_cases()
    answers = generate_fn([messages for messages, _ in cases])
    return [
        (messages[-1]["content"], answer, passes(expect, answer))
        for (messages, expect), answer in zip(cases, answers, strict=True)
    ]


def unseen_stories(count: int = 200) -> list[str]:
    """Stories from a separate random stream, with the grammar of the training text."""
    rng = Random(f"{_SEED}/stories")
    return [story(rng) for _ in range(count)]


def unseen_long_texts(count: int = 20) -> list[str]:
    rng = Random(f"{_SEED}/long")
    return [long_text(rng) for _ in range(count)]


def perplexity(
    logprob_fn: LogprobFn, encode: EncodeFn, texts: Sequence[str] | None = None, start: int = 0, stop: int | None = None
) -> float:
    """Perplexity over texts (unseen stories by default), at token positions ``start`` to ``stop``."""
    total, count = 0.0, 0
    for text in texts if texts is not None else unseen_stories():
        values = logprob_fn(list(encode(text))[:1024])[start:stop]
        total -= sum(values)
        count += len(values)
    return math.exp(total / max(count, 1))


def measure(folder: Path, per_task: int) -> dict[str, object]:
    """Returns the entry of ``results.json`` for one model directory."""
    model = decoder(folder)
    encode: EncodeFn = lambda text: model.tokenizer.encode(text).ids  # noqa: E731
    table = accuracy(model.answers, per_task)
    seen = newcomers(model.answers)
    right = sum(pair[0] for pair in table.values())
    total = sum(pair[1] for pair in table.values())
    long = unseen_long_texts()
    return {
        "accuracy": {name: {"right": pair[0], "of": pair[1]} for name, pair in table.items()},
        "all tasks": {"right": right, "of": total, "share": round(right / total, 4)},
        "tools": tool_accuracy(model.answers, 4 * per_task),
        "newcomers": {"right": sum(case[2] for case in seen), "of": len(seen)},
        "newcomer failures": [{"prompt": case[0], "answer": case[1]} for case in seen if not case[2]],
        "perplexity": {
            "unseen stories": round(perplexity(model.logprobs, encode), 4),
            "long texts, tokens 0-255": round(perplexity(model.logprobs, encode, long, 0, 255), 4),
            "long texts, tokens 512-1023": round(perplexity(model.logprobs, encode, long, 511, 1023), 4),
        },
        "parameters": sum(weight.numel() for weight in model.model.parameters()),
        "bytes": sum(path.stat().st_size for path in folder.iterdir() if path.is_file()),
    }


def _counts(counts: dict[str, int]) -> str:
    """Text such as ``3/4``, with the counts of parts."""
    parts = [f"{name} {value}" for name, value in counts.items() if name not in ("right", "of")]
    return ", ".join([f"{counts['right']}/{counts['of']}", *parts])


def _show(found: dict[str, object]) -> None:
    for name, value in found.items():
        if isinstance(value, dict):
            print(name)
            for key, inner in value.items():
                print(f"  {key}: {_counts(inner) if isinstance(inner, dict) else inner}")
        else:
            print(f"{name}: {value}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=DEMO)
    parser.add_argument("--per-task", type=int, default=50)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--threads", type=int, default=2, help="1 where other work fills the cores: two would wait")
    parser.add_argument("--failures", action="store_true", help="print wrong answers instead of figures")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.failures:
        model = decoder(arguments.model)
        wrong = failures(model.answers, arguments.per_task) + tool_failures(model.answers, arguments.per_task)
        for sample, answer in wrong:
            print(f"[{sample.task}] {sample.messages[-1]['content']!r} gave {answer!r}, not {sample.answer!r}")
        return
    found = measure(arguments.model, arguments.per_task)
    if arguments.json:
        print(json.dumps(found, indent=2))
    else:
        _show(found)


if __name__ == "__main__":
    main()
