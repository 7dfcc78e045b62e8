"""Which engines do which part of a request."""

from typing import Any

from antiphon.services.gateway.path.router import Router
from tests.unit.gateway.requests.test_router import BLOCKS, engine

PREFILL: dict[str, Any] = {"role": "prefill", "kv_address": "127.0.0.1:1"}


def test_answers_are_generated_by_engines_that_do_more_than_prompts():
    members = [engine("p", **PREFILL), engine("d", role="decode", num_running=8)]
    chosen = Router().choose_engine(members, "m", 10, [])
    assert chosen is not None
    assert chosen.id == "d"


def test_vectors_are_computed_by_engines_that_compute_prompts():
    members = [engine("p", num_running=8, **PREFILL), engine("d", role="decode")]
    chosen = Router().choose_engine(members, "m", 10, [], pools=True)
    assert chosen is not None
    assert chosen.id == "p"


def test_with_one_role_alone_its_engines_do_everything():
    router = Router()
    for member in (engine("p", **PREFILL), engine("d", role="decode")):
        for pools in (False, True):
            assert router.choose_engine([member], "m", 10, [], pools=pools) is member


def test_prompts_go_to_the_cheapest_prefill_engine_with_credit():
    router, decode = Router(), engine("d", role="decode")
    full, busy, idle = engine("a", credits=-9, **PREFILL), engine("b", num_running=4, **PREFILL), engine("c", **PREFILL)
    router.record_dispatch(full, "s0", 10, [])
    able = router.prefill_engines([full, busy, idle, decode, engine("x", model="other", **PREFILL)], "m", decode)
    assert able == [full, busy, idle]
    assert router.choose_prefill(able, 10, [], "", configuration="") is idle
    assert router.choose_prefill([full], 10, [], "", configuration="") is None


def test_prefill_engines_of_another_configuration_get_work_that_would_wait_for_those_of_the_same():
    """For example one with two devices beside one with a single device, like the decode engine."""
    router, decode = Router(), engine("d", role="decode", configuration="x")
    same, other = engine("b", configuration="x", **PREFILL), engine("a", configuration="y", **PREFILL)
    able = router.prefill_engines([same, other], "m", decode)
    assert able == [same, other]
    got = []
    for number in range(6):
        chosen = router.choose_prefill(able, 1000, [], "", configuration="x")
        assert chosen is not None
        router.record_dispatch(chosen, f"s{number}", 1000, [])
        got.append(chosen.id)
    assert got[0] == "b"
    assert 2 <= got.count("a") <= 3
    full = engine("b", 2, configuration="x", **PREFILL, credits=-9)
    router.record_dispatch(full, "s9", 10, [])
    assert router.choose_prefill([full, other], 10, [], "", configuration="x") is other


def test_only_prefill_engines_with_the_same_weights_compute_prompts():
    router, decode = Router(), engine("d", role="decode", content="w")
    same, other = engine("a", content="w", **PREFILL), engine("b", content="v", **PREFILL)
    assert router.prefill_engines([same, other], "m", decode) == [same]
    assert router.prefill_engines([other], "m", decode) == []


def test_a_prefill_engine_that_does_not_answer_is_left_out():
    router, decode, silent = Router(), engine("d", role="decode"), engine("a", **PREFILL)
    router.record_dispatch(silent, "s0", 10, [])
    router.record_silence(("a", "instance_id"), "s0")
    assert router.prefill_engines([silent], "m", decode) == []


def test_what_a_decode_engine_has_cached_is_not_missing():
    router, decode = Router(), engine("d", role="decode")
    assert router.num_missing_tokens(decode, 100, BLOCKS) == 100
    router.record_dispatch(decode, "s0", 1, BLOCKS[:3])
    assert router.num_missing_tokens(decode, 100, BLOCKS) == 100 - 3 * 16
