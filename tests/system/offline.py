"""What the tests of the offline API share: settings, prompts and a call without a progress bar."""

from typing import Any

from antiphon import LLM, RequestOutput, SamplingParams

FLAGS = {"dtype": "float32", "block_size": 8, "kv_cache_memory_gb": 0.05, "threads": 1}
GREEDY = SamplingParams(temperature=0, max_tokens=8)
PROMPTS = ["What is 12 + 7?", "Name a colour."]
LONG = "word " * 60


def generate(llm: LLM, *arguments: Any, **named: Any) -> list[RequestOutput]:
    return llm.generate(*arguments, use_tqdm=False, **named)
