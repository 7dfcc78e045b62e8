"""Sequences whose masks are late or too slow: on every backend the tokens that there are stay the same."""

import json
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest

from antiphon.services.engine.backends.triton.worker import TritonWorker
from antiphon.services.engine.core.plan import CoreLimits
from antiphon.services.engine.core.request import SequenceSpec
from antiphon.services.engine.engine import Engine
from antiphon.services.engine.steps.loop import StepReport
from antiphon.services.engine.worker.batch.mask_turns import MaskTurns
from antiphon.services.engine.worker.interface import ModelWorker
from antiphon.shared import limits
from antiphon.shared.errors import ServiceError
from antiphon.shared.parameters.grammar import Grammar
from antiphon.shared.parameters.sampling import SamplingParams
from tests.model.harness import Models, make_prompt, make_worker
from tests.model.test_parallel import SHAPES, ranks_of

pytestmark = pytest.mark.model
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 9},
        "kinds": {"type": "array", "items": {"enum": ["a", "b"]}},
    },
    "required": ["name", "kinds"],
}
JSON = Grammar("json", json.dumps(SCHEMA))
LITERAL = Grammar("regex", "(the engine and the gateway ){40}")
HOSTILE = Grammar("grammar", 'root ::= ("a" root root | "b" root root root | "")')
"""An ambiguous grammar: each token takes more time than the one before."""


class Outputs:
    """What an engine reports of its sequences."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.errors: dict[str, ServiceError] = {}
        self.num_steps = 0

    def report(self, report: StepReport) -> None:
        self.num_steps += bool(report.outcomes)
        for outcome in report.outcomes:
            assert outcome.position == len(self.tokens[outcome.sequence_id])
            assert outcome.token_ids
            self.tokens[outcome.sequence_id] += outcome.token_ids
        for sequence_id, error in report.refused:
            assert sequence_id not in self.errors
            self.errors[sequence_id] = error


def outputs(worker: ModelWorker, grammars: dict[str, Grammar | None], num_tokens: int, **bounds: Any) -> Outputs:
    """Runs one sequence for each grammar, with another prompt and seed for each. The first one begins alone."""
    found = Outputs()
    engine = Engine.of_worker(worker, CoreLimits(**{"max_num_seqs": 8, **bounds}), found.report)
    for number, (name, grammar) in enumerate(grammars.items()):
        fields: dict[str, Any] = {"temperature": 0.0 if number % 3 == 0 else 1.0, "seed": number}
        if grammar is HOSTILE:
            fields["logit_bias"] = tuple((end, -100.0) for end in worker.facts().eos_token_ids)
        params = SamplingParams(max_tokens=num_tokens, grammar=grammar, ignore_eos=grammar is None, **fields)
        # Not through the gate: a grammar that is not compiled yet makes its sequence wait, too.
        engine._loop.add(SequenceSpec(sequence_id=name, prompt_token_ids=tuple(make_prompt(5 + number)), params=params))
        if number == 0:
            # The first one is computed with plans ahead when the others join.
            for _ in range(3):
                engine.step()
    while engine.step():
        pass
    assert not engine.has_work
    engine.check_idle()
    return found


GUIDED: dict[str, Grammar | None] = {"a": None, "b": JSON, "c": JSON, "d": LITERAL, "e": JSON, "f": LITERAL}


def give(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Sets the time for the masks of a step. With no time, one sequence gets its masks."""
    monkeypatch.setattr(limits, "MASKS_STEP_LEAST_S", seconds)
    monkeypatch.setattr(limits, "MASKS_STEP_MOST_S", seconds)


@pytest.mark.parametrize(
    ("backend", "bounds", "overrides"),
    [
        ("native", {}, {}),
        ("native", {"num_speculative_tokens": 4}, {}),
        ("native", {"enable_prefix_caching": False}, {"num_gpu_blocks_override": 9}),
        ("torch", {}, {}),
        ("torch", {"num_speculative_tokens": 4}, {}),
        pytest.param("triton", {}, {}, marks=pytest.mark.slow),
        pytest.param("triton", {"num_speculative_tokens": 4}, {}, marks=pytest.mark.slow),
    ],
)
def test_sequences_that_wait_for_their_masks_get_the_same_tokens(
    backend: str, bounds: dict[str, Any], overrides: dict[str, Any], models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Triton's interpreter takes half a second for a step.
    num_tokens = 4 if backend == "triton" else 40
    worker = make_worker(backend, models("llama"), max_num_seqs=8, **overrides)
    give(monkeypatch, 60.0)
    at_once = outputs(worker, GUIDED, num_tokens, **bounds)
    give(monkeypatch, 0.0)
    in_turn = outputs(worker, GUIDED, num_tokens, **bounds)
    assert in_turn.tokens == at_once.tokens
    assert in_turn.tokens.keys() == GUIDED.keys()
    assert not in_turn.errors
    assert in_turn.num_steps > 2 * at_once.num_steps


@pytest.mark.parametrize(("tp_size", "pp_size"), SHAPES)
def test_ranks_agree_on_whose_masks_are_computed(
    tp_size: int, pp_size: int, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = ranks_of(models("llama"), tp_size, pp_size)
    give(monkeypatch, 60.0)
    at_once = outputs(worker, GUIDED, 12)
    give(monkeypatch, 0.0)
    assert outputs(worker, GUIDED, 12).tokens == at_once.tokens
    monkeypatch.setattr(limits, "MASK_COST_S", 0.0)
    monkeypatch.setattr(limits, "MASK_EXCESS_S", 1e-6)
    ended = outputs(worker, GUIDED, 12)
    assert ended.tokens["a"] == at_once.tokens["a"]
    assert ended.errors.keys() == GUIDED.keys() - {"a"}


@pytest.mark.matrix("R-06")
@pytest.mark.parametrize("backend", ["native", "torch"])
def test_a_hostile_grammar_ends_its_own_sequence_and_changes_no_other(backend: str, models: Models) -> None:
    worker = make_worker(backend, models("llama"), max_num_seqs=8)
    others: dict[str, Grammar | None] = {"a": None, "b": JSON}
    alone = outputs(worker, others, 60)
    found = outputs(worker, {**others, "hostile": HOSTILE, "hostile too": HOSTILE}, 400)
    for name, tokens in alone.tokens.items():
        assert found.tokens[name][: len(tokens)] == tokens
    assert {name: error.code for name, error in found.errors.items()} == dict.fromkeys(
        ("hostile", "hostile too"), "invalid_value"
    )
    # In the middle of their outputs.
    assert all(20 < len(found.tokens[name]) < 400 for name in found.errors)


def test_a_gpu_computes_a_step_while_the_processor_computes_its_masks(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = make_worker("triton", models("llama"), max_num_seqs=8)
    assert isinstance(worker, TritonWorker)
    order: list[str] = []
    monkeypatch.setattr(worker, "_compute", noted(order, "forward", worker._compute))
    monkeypatch.setattr(MaskTurns, "compute", noted(order, "masks", MaskTurns.compute))
    outputs(worker, {"a": JSON}, 2)
    assert order == ["forward", "masks"] * (len(order) // 2)
    assert order


def noted(order: list[str], name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        order.append(name)
        return function(*arguments, **named)

    return call
