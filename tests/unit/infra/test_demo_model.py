"""The demo model's recipe: all exercises are there, and those with tools are written as the server writes and reads."""

import json
from pathlib import Path
from random import Random

import torch
from jsonschema import validate
from safetensors.torch import load_file

from antiphon.services.gateway.apis.parsers.formats import TOOL_FORMATS
from antiphon.shared.models.model_files import DEMO_DIRECTORY
from infra.demo_model.batches import Maker
from infra.demo_model.checkpoint import write_checkpoint
from infra.demo_model.evaluate import tool_accuracy, tool_samples
from infra.demo_model.exercises.tasks import task_names
from infra.demo_model.exercises.tasks_tools import TOOL_TASKS, tool_conversation
from infra.demo_model.exercises.tool_questions import question
from infra.demo_model.export import export
from infra.demo_model.generate import load_model
from infra.demo_model.sample import Sample, assistant, is_held_out, passes, read_call, user
from infra.demo_model.tokenizer import load, render

RESULTS = Path(__file__).parents[3] / "infra" / "demo_model" / "results.json"


def calls(per_task: int = 40) -> list[Sample]:
    return [sample for sample in tool_samples(per_task) if sample.judged_by.kind == "call"]


def test_every_exercise_that_was_measured_is_registered() -> None:
    assert list(json.loads(RESULTS.read_text(encoding="utf-8"))["accuracy"]) == task_names()


def test_the_call_is_one_of_an_offered_tool_and_fits_its_schema() -> None:
    for sample in calls():
        call = read_call(sample.answer)
        assert call is not None
        functions = {tool["function"]["name"]: tool["function"] for tool in sample.tools}
        assert len(functions) == len(sample.tools)
        validate(call["arguments"], functions[call["name"]]["parameters"])


def test_the_call_is_what_the_template_writes_and_the_gateway_reads() -> None:
    for sample in calls():
        call = read_call(sample.answer)
        assert call is not None
        history = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]}
        answered = [*sample.messages, assistant(sample.answer)]
        assert render([*sample.messages, history], tools=sample.tools) == render(answered, tools=sample.tools)  # type: ignore[list-item]
        parser = TOOL_FORMATS["hermes"].parser(sample.tools)
        parser.feed(sample.answer)
        parser.finish()
        assert parser.num_calls == 1


def test_the_values_of_a_call_are_in_the_question() -> None:
    for sample in calls():
        call = read_call(sample.answer)
        assert call is not None
        assert all(str(value) in sample.messages[-1]["content"] for value in call["arguments"].values())


def test_questions_that_are_measured_are_not_trained_on() -> None:
    rng = Random(1)
    asked = [question(rng) for _ in range(2000)]
    held = {found.text for found in asked if is_held_out("tools", found.key)}
    assert len(held) > 40
    trained = [tool_conversation(rng)[0] for _ in range(2000)]
    assert not held & {message["content"] for messages in trained for message in messages}
    assert all(is_held_out("tools", sample.key) for sample in calls())


def test_an_answer_is_judged_by_its_call_or_by_having_none() -> None:
    samples = tool_samples(5)
    assert {sample.task for sample in samples} == set(TOOL_TASKS)
    for sample in samples:
        assert passes(sample.judged_by, sample.answer)
        wrong = "Hm." if sample.judged_by.kind in ("call", "has_all") else '<tool_call>\n{"name": "f"}'
        assert not passes(sample.judged_by, wrong)
    right = tool_accuracy(lambda _messages, _tools: [sample.answer for sample in samples], 5)
    assert all(count == 5 for counts in right.values() for count in counts.values())
    assert right["call a tool"].keys() == {"of", "right", "well-formed", "right name", "right arguments"}
    assert read_call('<tool_call>\n{"name": "f"}\n</tool_call>') is None


def test_a_call_is_not_learnt_where_no_tool_is_offered() -> None:
    maker = Maker(load(), seed=1)
    for seed in range(60):
        tools = tool_conversation(Random(seed))[1]
        document = maker.tooled(Random(seed))
        learnt = maker.tokenizer.decode(
            [token for token, learn in zip(document.ids, document.learnt, strict=True) if learn]
        )
        assert learnt
        assert tools or "tool_call" not in learnt


def test_a_question_for_each_tool_is_asked_where_several_are() -> None:
    messages, tools = tool_conversation(Random(1), several=1.0)
    called = [call["name"] for message in messages if (call := read_call(message["content"])) is not None]
    assert sorted(called) == sorted(tool["function"]["name"] for tool in tools)


def test_a_prompt_without_tools_is_that_of_before() -> None:
    assert render([user("Hi")], prompt=True, tools=()) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_the_shipped_weights_become_a_checkpoint_and_weights_again(tmp_path: Path) -> None:
    write_checkpoint(load_model(DEMO_DIRECTORY).state_dict(), tmp_path / "start.pt", 7, 9)
    state = torch.load(tmp_path / "start.pt", weights_only=True)
    assert (state["step"], state["tokens"]) == (7, 9)
    export(tmp_path / "start.pt", tmp_path, DEMO_DIRECTORY)
    shipped, again = (load_file(folder / "model.safetensors") for folder in (DEMO_DIRECTORY, tmp_path))
    assert shipped.keys() == again.keys()
    assert all(torch.equal(shipped[name], again[name]) for name in shipped)
