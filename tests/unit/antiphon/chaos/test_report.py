"""When a run has passed, and which silence belongs to which fault."""

from dataclasses import replace

from antiphon.chaos.report import lines, make_report, percentile
from antiphon.chaos.schedule import Fault
from antiphon.chaos.streams import Answer, Difference, Known, Outcome
from antiphon.chaos.targets import Injection

KNOWN = Known({}, [1, 2, 3], "abc")
GOOD = Outcome(
    known=KNOWN,
    began_s=90.0,
    ended_s=120.0,
    answer=Answer(token_ids=[1, 2, 3], text="abc", finish_reason="length"),
    gaps=[(100.2, 101.2), (110.0, 119.0)],
)
KILL = Injection(Fault(at_s=10.0, kind="kill", group="engine", targets=("engine-1",)), 100.0, 102.0)
FREEZE = Injection(Fault(at_s=18.0, kind="freeze", group="nats", targets=("nats",), duration_s=2.0), 108.0, 110.0)


def test_a_run_without_a_difference_passes():
    report = make_report(1, 60, [KILL, FREEZE], [GOOD], [])
    assert report.passed
    assert report.as_json()["passed"] is True
    assert (report.streams, report.tokens) == (1, 3)
    assert list(lines(report))[-1].startswith("passed: 2 faults")


def test_a_silence_belongs_to_the_fault_at_whose_time_it_begins():
    rows = {row.group: row for row in make_report(1, 60, [KILL, FREEZE], [GOOD], []).faults}
    assert round(rows["engine"].stall_max_s, 6) == 1.0
    assert round(rows["nats"].stall_max_s, 6) == 9.0


def test_streams_that_did_not_meet_a_fault_do_not_count_for_it():
    late = replace(GOOD, began_s=101.0, gaps=[(101.0, 118.0)])
    rows = {row.group: row for row in make_report(1, 60, [KILL], [late], []).faults}
    assert rows["engine"].stall_max_s == 0.0


def test_every_departure_from_the_promise_fails_the_run():
    unseen = replace(KILL, problem="engine-1 lives")
    assert not make_report(1, 60, [unseen], [GOOD], []).passed
    assert not make_report(1, 60, [KILL], [GOOD], ["engine-1: 3 of 4 KV blocks are free"]).passed
    for bad in (
        replace(GOOD, difference=Difference(lost=1)),
        replace(GOOD, difference=Difference(repeated=1)),
        replace(GOOD, difference=Difference(differing=True)),
        replace(GOOD, hung=True),
        replace(GOOD, problem="error event"),
    ):
        report = make_report(1, 60, [KILL], [GOOD, bad], [])
        assert not report.passed
        assert any(line.startswith("PROBLEM") for line in lines(report))
        assert list(lines(report))[-1].startswith("FAILED")


def test_a_problem_names_the_faults_of_its_time():
    broken = replace(GOOD, began_s=101.0, ended_s=103.5, problem="connection: reset")
    long_before = replace(KILL, began_s=60.0, ended_s=61.0)
    (told,) = make_report(1, 60, [long_before, KILL, FREEZE], [broken], []).problems
    assert told == "stream of 2.5 s, 3 of 3 tokens: no proper end (connection: reset; kill of engine-1 at -1.0 s)"


def test_percentiles_are_values_that_occurred():
    assert percentile([], 0.5) == 0
    assert percentile([1, 2, 3, 4], 0.5) == 2
    assert percentile([1, 2, 3, 4], 0.99) == 4


def test_faults_without_another_one_beside_them_have_stalls_of_their_own():
    second = Injection(Fault(at_s=50.0, kind="kill", group="engine", targets=("engine-2",)), 140.0, 141.0)
    beside = Injection(Fault(at_s=50.5, kind="freeze", group="nats", targets=("nats",), duration_s=2.0), 140.5, 142.5)
    late = Outcome(
        known=KNOWN,
        began_s=130.0,
        ended_s=150.0,
        answer=Answer(token_ids=[1, 2, 3], text="abc", finish_reason="length"),
        gaps=[(140.1, 148.1)],
    )
    report = make_report(1, 60, [KILL, second, beside], [GOOD, late], [])
    row = next(row for row in report.faults if row.group == "engine")
    assert (row.count, round(row.stall_p99_s, 6)) == (2, 8.0)
    assert (row.alone, round(row.alone_p99_s, 6)) == (1, 1.0)
    frozen = next(row for row in report.faults if row.group == "nats")
    assert (frozen.alone, frozen.alone_p99_s) == (0, 0.0)
    assert any(line.endswith("1   1.00 s   1.00 s") for line in lines(report))


def test_the_report_for_programs_has_each_fault():
    second = Injection(Fault(at_s=50.0, kind="kill", group="engine", targets=("engine-2",)), 140.0, 141.0)
    late = Outcome(
        known=KNOWN,
        began_s=130.0,
        ended_s=150.0,
        answer=Answer(token_ids=[1, 2, 3], text="abc", finish_reason="length"),
        gaps=[(140.1, 148.1)],
    )
    (row,) = make_report(1, 60, [KILL, second], [GOOD, late], []).as_json()["faults"]
    found = [(one["at_s"], one["targets"], one["alone"], round(one["stall_p99_s"], 6)) for one in row["each"]]
    assert found == [(10.0, ("engine-1",), True, 1.0), (50.0, ("engine-2",), True, 8.0)]


def test_calm_moments_have_a_row_but_are_no_faults():
    calm = [Injection(Fault(at_s=0.0, kind="none", group="calm", targets=()), 109.5, 109.5)]
    report = make_report(1, 60, [KILL], [GOOD], [], calm=calm)
    assert [(row.kind, row.group) for row in report.faults] == [("none", "calm"), ("kill", "engine")]
    assert round(report.faults[0].stall_max_s, 6) == 9.0
    assert list(lines(report))[-1].startswith("passed: 1 faults")


def test_the_parts_of_the_longest_stalls_are_told():
    timeline = {"created": 0.0, "admitted_s": None, "tokenized_s": None, "sequences": []}
    report = make_report(1, 60, [KILL], [replace(GOOD, timeline=timeline)], [])
    assert {name: round(seconds, 6) for name, seconds in report.faults[0].parts.items()} == {"client": 1.0}
    assert any(line == "LONGEST TENTH after kill engine: client 1.00 s" for line in lines(report))
    assert not any(line.startswith("LONGEST") for line in lines(make_report(1, 60, [KILL], [GOOD], [])))
