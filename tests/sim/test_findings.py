"""Small runs of the swarm in which the product once failed, as data: they stay the same when the drawing changes."""

from dataclasses import replace

import pytest

from antiphon.shared.parameters.sampling import SamplingParams
from tests.sim.model import HashModel
from tests.sim.plan import MAX_MODEL_LEN, Fault, Load, Place, Plan
from tests.sim.run import make_models
from tests.sim.swarm import run_plan

MODEL = HashModel("m0")
WORKER = {"num_blocks": 64, "max_model_len": MAX_MODEL_LEN}


@pytest.fixture(scope="module")
def model_dirs(tmp_path_factory) -> tuple[str, ...]:
    return make_models(tmp_path_factory.mktemp("models"))


def plan_of(load: Load, faults: tuple[Fault, ...] = (), **others: object) -> Plan:
    members = tuple(Place(kind, f"{kind}0") for kind in ("gateway", "tokenizer", "detokenizer", "engine"))
    plan = Plan(0, members, (MODEL,), worker=dict(WORKER), step_s=0.04, loads=(load,), faults=faults)
    return replace(plan, **others)  # type: ignore[arg-type]


def check(plan: Plan, model_dirs: tuple[str, ...]) -> None:
    result = run_plan(plan, model_dirs)
    assert not result.violations, f"{plan}\n{result.report()}"
    assert result.outcomes == {"ok": 1}


def test_a_sequence_that_ends_before_its_submit_is_answered_is_not_placed_again(model_dirs):
    """The answers of the engine are lost: the first sequence is over while its submit is still asked again."""
    load = Load(0, 0.2, 0, 0, ("one", "two"), SamplingParams(max_tokens=66, temperature=0.0))
    first, second = (each.text for each in load.references(MODEL))
    stop = next(first[i : i + 2] for i in range(len(first)) if first[i : i + 2] not in second)
    lost = Fault(0.1, "drop", "", 3.0, "antiphon.v3.inbox.>", "engine0", "gateway0")
    check(plan_of(replace(load, stop=stop), (lost,)), model_dirs)


def test_an_engine_whose_outbound_buffer_is_full_loses_tokens_and_not_its_life(model_dirs):
    load = Load(0, 0.2, 0, 0, ("one",), SamplingParams(max_tokens=66, temperature=0.0), n=2)
    outage = Fault(0.8, "outage", "", 1.0)
    check(plan_of(load, (outage,), bounds={"OUTBOUND_BYTES_MAX": 1500}), model_dirs)


@pytest.mark.parametrize("steps", [1, 8])
def test_the_tokens_of_a_step_that_do_not_fit_one_message_leave_in_several(model_dirs, steps):
    load = Load(0, 0.2, 0, 0, ("one", "two"), SamplingParams(max_tokens=40, temperature=1.0, logprobs=6), n=3)
    bounds = {"BUS_PAYLOAD_BYTES": 600, "STREAM_EVENT_TOKENS_MAX": 1}
    check(plan_of(load, flags={"num_scheduler_steps": steps}, bounds=bounds), model_dirs)


def test_a_replay_that_does_not_fit_one_message_leaves_in_several(model_dirs):
    load = Load(0, 0.2, 0, 0, ("one",), SamplingParams(max_tokens=66, temperature=1.0, logprobs=6))
    lost = Fault(0.5, "drop", "", 2.0, "antiphon.v3.det.*.*.tok")
    bounds = {"BUS_PAYLOAD_BYTES": 600, "STREAM_EVENT_TOKENS_MAX": 1}
    check(plan_of(load, (lost,), bounds=bounds), model_dirs)
