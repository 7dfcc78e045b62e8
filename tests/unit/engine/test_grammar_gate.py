"""The gate of grammars: whose grammar is compiled next, and what becomes of sequences that are ended meanwhile."""

import threading
import time
from dataclasses import replace

from antiphon.services.engine.core.request import SequenceSpec
from antiphon.services.engine.grammar_gate import GrammarGate
from antiphon.shared.errors import ServiceError
from antiphon.shared.parameters.grammar import Grammar
from antiphon.shared.parameters.sampling import SamplingParams
from antiphon.shared.parameters.thinking import ThinkingBudget

COMPILE_S = 0.01


class Scene:
    """A gate whose compiler takes `COMPILE_S` of CPU time for each grammar, and waits before the first one."""

    def __init__(self) -> None:
        self.may_begin = threading.Event()
        self.admitted = list[str]()
        self.refused = list[tuple[str, ServiceError]]()
        self.gate = GrammarGate(self.compile, self.admit, self.abort, self.refuse)

    def compile(self, grammar: Grammar) -> None:
        self.may_begin.wait()
        if grammar.text == "broken":
            raise ServiceError("invalid_value", "broken")
        ends = time.thread_time() + COMPILE_S
        while time.thread_time() < ends:
            pass

    def admit(self, spec: SequenceSpec) -> None:
        self.admitted.append(spec.sequence_id)

    def abort(self, sequence_id: str) -> None:
        pass

    def refuse(self, sequence_id: str, error: ServiceError) -> None:
        self.refused.append((sequence_id, error))

    def add(self, name: str, client: str = "", text: str = "a") -> None:
        params = SamplingParams(max_tokens=4, grammar=Grammar("regex", text))
        spec = SequenceSpec(sequence_id=name, prompt_token_ids=(1,), params=params)
        self.gate.add(replace(spec, client=client))

    def run(self) -> list[str]:
        self.may_begin.set()
        while len(self.gate):
            time.sleep(0.001)
        self.gate.close()
        return self.admitted


def test_many_grammars_of_one_client_do_not_hold_up_those_of_another() -> None:
    scene = Scene()
    for number in range(12):
        scene.add(f"many{number}", "many")
    for number in range(2):
        scene.add(f"few{number}", "few")
    order = scene.run()
    assert len(order) == 14
    assert max(order.index("few0"), order.index("few1")) <= 5
    assert [name for name in order if name.startswith("many")] == [f"many{number}" for number in range(12)]


def test_sequences_without_a_client_are_prepared_in_order() -> None:
    scene = Scene()
    for number in range(6):
        scene.add(str(number))
    assert scene.run() == [str(number) for number in range(6)]


def test_a_sequence_that_was_aborted_is_not_admitted_and_one_with_a_broken_grammar_is_refused() -> None:
    scene = Scene()
    for name, text in (("first", "a"), ("aborted", "a"), ("broken", "broken"), ("last", "a")):
        scene.add(name, "client", text)
    scene.gate.abort("aborted")
    assert scene.run() == ["first", "last"]
    assert [name for name, _ in scene.refused] == ["broken"]


def test_a_thinking_budget_waits_for_the_texts_of_tokens_which_a_compiled_grammar_brings() -> None:
    scene = Scene()
    params = SamplingParams(max_tokens=4, thinking=ThinkingBudget(budget=2, opening=(1,), closing=(2,)))
    scene.gate.add(SequenceSpec(sequence_id="thinks", prompt_token_ids=(1,), params=params))
    scene.gate.add(SequenceSpec(sequence_id="plain", prompt_token_ids=(1,), params=SamplingParams(max_tokens=4)))
    assert (scene.admitted, len(scene.gate)) == (["plain"], 1)
    assert scene.run() == ["plain", "thinks"]
