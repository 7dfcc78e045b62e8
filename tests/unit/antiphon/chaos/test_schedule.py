"""Which faults a run has: repeatable, all kinds, and never more than a launcher survives."""

from itertools import pairwise

from antiphon.chaos.schedule import (
    ALL_GATEWAYS,
    EVERY_S,
    FREEZE_S,
    KILL_WINDOW_S,
    KILLS_MAX,
    QUIET_KILL_S,
    SPREAD,
    make_schedule,
)

PROCESSES = {
    "nats": ["nats"],
    **{service: [f"{service}-1", f"{service}-2"] for service in ("gateway", "tokenizer", "engine", "detokenizer")},
}


def test_the_same_seed_gives_the_same_faults():
    assert make_schedule(5, 300, PROCESSES) == make_schedule(5, 300, PROCESSES)
    assert make_schedule(5, 300, PROCESSES) != make_schedule(6, 300, PROCESSES)


def test_every_service_all_gateways_and_the_bus_are_killed_frozen_and_stopped():
    every = {(kind, group) for kind in ("kill", "freeze", "stop") for group in (*PROCESSES, ALL_GATEWAYS)}
    found: set[tuple[str, str]] = set()
    for seed in range(20):
        faults = make_schedule(seed, 600, PROCESSES)
        found |= {(one.kind, one.group) for one in faults}
        assert all(one.targets == ("gateway-1", "gateway-2") for one in faults if one.group == ALL_GATEWAYS)
        assert all(one.targets[0] in PROCESSES[one.group] for one in faults if one.group != ALL_GATEWAYS)
    assert found == every


def test_times_stay_within_their_bounds():
    faults = make_schedule(3, 600, PROCESSES)
    assert all(SPREAD[0] <= (later.at_s - early.at_s) / EVERY_S <= SPREAD[1] for early, later in pairwise(faults))
    assert all(one.at_s < 600 for one in faults)
    assert all((one.kind == "freeze") == (FREEZE_S[0] <= one.duration_s <= FREEZE_S[1]) for one in faults)


def test_no_process_is_killed_as_often_as_its_launcher_gives_it_up():
    for seed in range(5):
        faults = make_schedule(seed, 3000, PROCESSES)
        for name in (name for names in PROCESSES.values() for name in names):
            kills = [one.at_s for one in faults if one.kind != "freeze" and name in one.targets]
            assert kills
            assert all(later - early >= QUIET_KILL_S for early, later in pairwise(kills))
            assert all(sum(at <= one < at + KILL_WINDOW_S for one in kills) <= KILLS_MAX for at in kills)


def test_a_run_may_have_some_faults_only_and_leaves_out_kills_that_come_too_early():
    faults = make_schedule(1, 300, PROCESSES, only=[("kill", "gateway")])
    assert {(one.kind, one.group) for one in faults} == {("kill", "gateway")}
    assert {one.targets for one in faults} == {("gateway-1",), ("gateway-2",)}
    both = make_schedule(1, 300, PROCESSES, only=[("kill", "gateway"), ("freeze", "nats")])
    assert {(one.kind, one.group) for one in both} == {("kill", "gateway"), ("freeze", "nats")}
