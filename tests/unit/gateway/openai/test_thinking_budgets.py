"""Thinking budgets with every format of reasoning: an output that keeps to one is separated as the budget says."""

import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from llguidance import LLTokenizer
from tokenizers import AddedToken, Tokenizer

from antiphon.services.engine.sampling import masks
from antiphon.services.engine.sampling.grammar import GrammarCompiler
from antiphon.services.engine.sampling.processor import Adjustment, LogitsProcessor
from antiphon.services.engine.sampling.processors import processors_of
from antiphon.services.engine.sampling.thinking import ThinkingLimit
from antiphon.services.gateway.apis.openai.tools.answer_format import AnswerFormat
from antiphon.services.gateway.apis.openai.tools.strict_calls import strict_calls
from antiphon.services.gateway.apis.openai.tools.tool_choice import NO_TOOLS, ToolChoice
from antiphon.services.gateway.apis.parsers.formats import TOOL_FORMATS
from antiphon.services.gateway.apis.parsers.output_parser import Splitter
from antiphon.services.gateway.apis.parsers.reasoning_formats import REASONING_FORMATS
from antiphon.shared.models.model_files import DEMO_DIRECTORY
from antiphon.shared.parameters.sampling import SamplingParams
from antiphon.shared.parameters.thinking import ThinkingBudget
from antiphon.shared.settings.output_formats import REASONING_ALIASES
from tests.tokenizer_files import token_id

NAMES = [name for name in REASONING_FORMATS if name not in REASONING_ALIASES]
END = "<|im_end|>"
BUDGET, SIZE = 9, 4200
WORDS = (" a", " story", ".\n", " <", "</", "think", "\n\n", " Here is", " my", ">", "[/", "<|", " :")
"""What the model thinks, with beginnings of marks."""
FORMATS_OF_CALLS = {"deepseek_r1": "deepseek_v3", "mistral": "mistral", "granite": "hermes"} | {
    name: name for name in ("gpt_oss", "seed_oss", "gemma4", "hunyuan")
}
"""For each format of reasoning, that of the same models' calls; `qwen3_coder` for the others."""


@cache
def tokenizer(name: str, special: bool) -> Tokenizer:
    """The demo model's tokenizer, with the special tokens of the format or without them."""
    found = Tokenizer.from_file(str(DEMO_DIRECTORY / "tokenizer.json"))
    if special:
        calls = TOOL_FORMATS[FORMATS_OF_CALLS.get(name, "qwen3_coder")].special_tokens
        marks = dict.fromkeys((*REASONING_FORMATS[name].special_tokens, *calls))
        found.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in marks])
    return found


@cache
def compiler(name: str, special: bool) -> GrammarCompiler:
    made = tokenizer(name, special)
    return GrammarCompiler(
        lambda: LLTokenizer(made.to_str(), n_vocab=SIZE, eos_token=[token_id(made, END)], slices=[]), SIZE
    )


def ids(name: str, special: bool, text: str) -> list[int]:
    return tokenizer(name, special).encode(text, add_special_tokens=False).ids


def budget(name: str, special: bool, prompt_tail: str) -> ThinkingBudget:
    limit = AnswerFormat(choice=NO_TOOLS, reasoning_format=REASONING_FORMATS[name]).thinking_limit(BUDGET)
    assert limit is not None
    marks = [tuple(ids(name, special, text)) for text in (limit.opening, limit.closing)]
    inside = limit.begins_inside(prompt_tail)
    return ThinkingBudget(budget=BUDGET, opening=marks[0], closing=marks[1], inside=inside, repeats=limit.repeats)


def text_of(name: str, special: bool, output: Sequence[int]) -> str:
    marks = REASONING_FORMATS[name].special_tokens if special else ()
    shown = [token_id(tokenizer(name, special), text) for text in marks]
    texts = compiler(name, special)
    return b"".join(texts.token_text(one, shown) for one in output).decode(errors="replace")


def split(splitter: Splitter, text: str) -> tuple[str, str]:
    parts = [splitter.feed(text)]
    while any(parts[-1]):
        parts.append(splitter.feed(""))
    parts.append(splitter.finish())
    return "".join(part.reasoning for part in parts), "".join(part.answer for part in parts)


def allowed(limits: Sequence[LogitsProcessor], position: int, drafts: Sequence[int] = ()) -> list[int] | None:
    adjustment = Adjustment()
    for one in limits:
        one.adjust(adjustment, position, drafts)
    assert not adjustment.error
    return None if adjustment.mask is None else masks.allowed_ids(adjustment.mask, SIZE).tolist()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("begins", ["output", "prompt"])
def test_after_the_budget_the_mark_is_forced_and_the_answer_follows(name: str, special: bool, begins: str) -> None:
    reasoning, draw = REASONING_FORMATS[name], random.Random(name)
    for _ in range(40):
        begun = (
            [] if begins == "prompt" else ids(name, special, draw.choice((f"{reasoning.opening}\n", reasoning.opening)))
        )
        tail = f"\n{reasoning.opening}\n" if begins == "prompt" else f"{reasoning.closing}\n"
        thinking = budget(name, special, tail)
        assert thinking.inside == (begins == "prompt")
        thoughts = [one for _ in range(BUDGET + 4) for one in ids(name, special, draw.choice(WORDS))]
        output, forced = [*begun], list[int]()
        made = ThinkingLimit(thinking, SIZE, compiler(name, special).token_text)
        for one in begun:
            made.append(one)
        while (token := made.forced()) is not None or not forced:
            forced += [] if token is None else [token]
            output.append(thoughts[len(output) - len(begun)] if token is None else token)
            made.append(output[-1])
            if reasoning.closing in text_of(name, special, output):
                break
        assert made.forced() is None
        assert len(output) - len(begun) <= BUDGET + len(thinking.closing)
        written = text_of(name, special, [*output, *ids(name, special, "Yes")])
        thought, answer = split(reasoning.splitter(inside=thinking.inside), written)
        assert answer.endswith("Yes"), written
        assert len(ids(name, special, thought)) <= BUDGET + 1


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("special", [True, False])
def test_strict_functions_hold_after_the_mark_that_a_budget_forces_with_drafts_as_without(
    name: str, special: bool
) -> None:
    reasoning, calls = REASONING_FORMATS[name], TOOL_FORMATS[FORMATS_OF_CALLS.get(name, "qwen3_coder")]
    parameters = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": parameters, "strict": True}}
    found = strict_calls(ToolChoice(mode="auto", tools=(tool,), places=(0,)), calls, reasoning)
    assert found is not None
    thinking = budget(name, special, "")
    params = SamplingParams(grammar=found.grammar, thinking=thinking)
    made = processors_of(params, (), (), frozenset(), SIZE, compiler(name, special))
    begun = () if thinking.inside else thinking.opening
    output = [*begun, *(token_id(tokenizer(name, special), "\u0120a") for _ in range(BUDGET))]
    for position, one in enumerate(output):
        mask = allowed(made, position)
        assert mask is None or (one in mask and len(mask) > 1)
        for each in made:
            each.append(one)
    for place, one in enumerate(thinking.closing):
        assert allowed(made, len(output) + place, thinking.closing[:place]) == [one]
    for place, one in enumerate(thinking.closing):
        assert allowed(made, len(output) + place) == [one]
        for each in made:
            each.append(one)
    free = allowed(made, len(output) + len(thinking.closing))
    assert free is None or len(free) > 1
    begins = calls.special_tokens[0] if name != "gpt_oss" else "<|start|>"
    assert free is None or ids(name, special, begins)[0] in free
