"""The verdicts of `make attack`, its tables, its victim's windows, and its watch over memory."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.attack import judging, page
from tests.attack.judging import FIGURES_ONLY, Goal, Seen, Told, Window, misses, window_of
from tests.attack.kinds import ATTACKS
from tests.attack.memory import MemoryWatch
from tests.attack.run import ALL, ALONE, EVERYTHING, parse
from tests.attack.target import KINDS
from tests.attack.victim import Watch
from tests.system.served import wait_until

CALM = Window(3.0, 300, 0.05, 0.1, 0.02)
GOOD = Window(10.0, 400, 0.2, 0.9, 0.5)


def seen(**changes: Any) -> Seen:
    return Seen(**{"told": Told(), "calm": CALM, "during": GOOD, "recovery_s": 1.0, **changes})


def test_an_attack_that_harms_nobody_is_held() -> None:
    assert misses(Goal(), seen(peak_mib={"gateway-1": 500.0})) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"told": Told(broken=["a file of another key was read"])}, "a file of another key was read"),
        ({"ended": ["gateway-1"]}, "gateway-1 ended"),
        ({"peak_mib": {"gateway-1": 1100.0}}, "gateway-1 took 1100 MiB, more than 1024"),
        ({"during": Window(10.0, 240, 0.2, 0.9, 0.5)}, "24% of its tokens/s"),
        ({"during": Window(10.0, 400, 1.1, 1.2, 0.5)}, "below 1.10 s"),
        ({"during": Window(10.0, 400, 0.2, 0.9, 3.1)}, "/livez took 3.1 s"),
        ({"during": Window(10.0, 400, 0.2, 0.9, 0.5, lost=2)}, "2 of the victim's streams were lost"),
        ({"during": Window(10.0, 400, 0.2, 0.9, 0.5, refused=1)}, "1 of the victim's requests were refused"),
        ({"recovery_s": None}, "had not recovered"),
        ({"calm": Window(3.0, 3, 0.05, 0.1, 0.02)}, "run it on an idle machine"),
    ],
)
def test_each_harm_is_a_miss(changes: dict[str, Any], said: str) -> None:
    [miss] = misses(Goal(), seen(**changes))
    assert said in miss


def test_what_a_goal_leaves_out_is_not_judged() -> None:
    assert misses(FIGURES_ONLY, seen(during=Window(10.0, 0, 9.0, 9.0, 9.0), recovery_s=None)) == []
    assert misses(Goal(), Seen(Told(), skipped="only root can do this", ended=["x"])) == []


def test_a_window_counts_the_gap_that_is_still_open(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    watch = Watch(streams=1)
    for now[0] in (0.1, 0.2, 0.3):
        watch.token(0)
    now[0] = 5.3
    window = watch.close()
    assert (window.tokens, window.seconds) == (3, 5.3)
    assert window.longest_gap_s == pytest.approx(5.0)
    # The next window has only its own part of the gap, until the token comes that ends it.
    now[0] = 6.3
    assert watch.close().longest_gap_s == pytest.approx(1.0)
    watch.token(0)
    assert watch.close().longest_gap_s == pytest.approx(6.0)


def test_a_quantile_is_not_the_longest_gap() -> None:
    window = window_of(10.0, 1000, [0.01] * 998 + [3.0, 4.0], [0.1], lost=0, refused=0)
    assert (window.p99_gap_s, window.longest_gap_s) == (0.01, 4.0)


def test_each_attack_has_a_name_a_goal_a_kind_of_server_and_a_line_in_the_page() -> None:
    assert len({one.name for one in ALL}) == len(ALL)
    assert {one.server for one in ALL} - set(KINDS) == {""}
    assert all(one.text or one.goal != FIGURES_ONLY for one in ALL)
    assert set(ALONE) <= {one.name for one in ATTACKS}
    text = page.PAGE.read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `([\w-]+)`", text.partition(page.BEGIN)[0], re.MULTILINE)) == {one.name for one in ALL}


def test_a_report_becomes_a_table_whose_cells_hold_what_was_missed() -> None:
    goal = Goal()
    found = [
        judging.result("good", "w", "a key", goal, "it holds", seen(peak_mib={"engine-1": 300.0}), 12.0),
        judging.result("bad", "w|x", "a key", goal, "it holds", seen(ended=["gateway-1"]), 12.0),
        judging.result("left", "w", "root", goal, "it holds", Seen(Told(), skipped="no root"), 0.0),
    ]
    report = json.loads(json.dumps([one.as_json() for one in found]))
    assert [one["verdict"] for one in report] == ["held", "broken", "skipped"]
    lines = page.table(report).splitlines()
    assert len(lines) == 5
    assert all(len(re.findall(r"(?<!\\)\|", line)) == len(page.HEAD) + 1 for line in lines)
    assert "engine-1: 300 MiB" in lines[2]
    assert "100 → 40" in lines[2]
    assert "**broken**: gateway-1 ended" in lines[3]
    assert "skipped: no root" in lines[4]


def test_the_last_attack_takes_a_minute_in_a_short_run_and_ten_in_a_whole_one() -> None:
    assert parse([]).minutes == 10.0
    assert parse(["--quick"]).minutes == 1.0
    assert parse(["--quick", "--minutes", "3"]).minutes == 3.0
    assert parse(["--only", EVERYTHING.name]).only == ["everything"]


def test_a_service_that_takes_too_much_memory_is_ended_and_told() -> None:
    hungry = "import sys, time; sys.stdin.readline(); x = bytearray(400 << 20); time.sleep(60)"
    launcher = (
        "import subprocess, sys; "
        f"subprocess.run([sys.executable, '-c', {hungry!r}, '--service-id=engine-1'], stdin=sys.stdin)"
    )
    process = subprocess.Popen([sys.executable, "-c", launcher], stdin=subprocess.PIPE)
    watch = MemoryWatch(process.pid, limit_mib=200.0)
    try:
        peak: dict[str, float] = {}
        wait_until(lambda: bool(peak.update(watch.take()[0]) or peak), 60)
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.flush()
        ended: list[str] = []
        wait_until(lambda: bool(ended.extend(watch.take()[1]) or "engine-1" in ended), 60)
        assert set(peak) == {"engine-1"}
    finally:
        watch.close()
        process.kill()
        process.communicate()


def test_the_page_is_written_from_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = tmp_path / "attacks.md"
    copy.write_text(f"head\n{page.BEGIN}\nformer\n{page.END}\ntail\n")
    report = {
        "date": "2026-01-01", "version": "1", "machine": "2 cores", "seed": 1, "memory_limit": "cgroups",
        "results": [judging.result("good", "w", "a key", Goal(), "it holds", seen(), 1.0).as_json()],
    }  # fmt: skip
    (tmp_path / "report.json").write_text(json.dumps(report))
    monkeypatch.setattr(page, "PAGE", copy)
    monkeypatch.setattr(sys, "argv", ["page", str(tmp_path / "report.json")])
    assert page.main() == 0
    text = copy.read_text()
    assert text.startswith(f"head\n{page.BEGIN}\n")
    assert text.endswith(f"{page.END}\ntail\n")
    assert "1 held, 0 broken, 0 skipped" in text
    assert "former" not in text
