"""`make attack`: attacks on real servers; exit code 1 if a goal was missed.

    python -m tests.attack.run [--quick] [--only NAME …] [--minutes 10] [--seed N] [--json FILE]

Each attack runs for some seconds, while another client's streams, /livez and the memory of all processes of the server
are measured. The last one, `everything`, makes all attacks of a limited key at once for `--minutes`.
docs/contributing/attacks.md says what is attacked, by whom, and what the goals are.
"""

import argparse
import datetime
import json
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from antiphon.shared.version import __version__
from bench.harness.serving import end_in_order
from bench.limits_of_machine.machine import facts
from tests.attack import judging, page
from tests.attack.attack import BOB, OWN, Attack
from tests.attack.crew import Made, make
from tests.attack.judging import FIGURES_ONLY, Goal, Result, Seen, Told, Window
from tests.attack.kinds import ATTACKS
from tests.attack.place import Place
from tests.attack.target import Target
from tests.attack.victim import Victim

LIMIT_MIB = 1024.0
STREAMS = 2
WARM_S, CALM_S, LOOK_S = 1.0, 3.0, 1.0
READY_S = 30.0
ALONE = ("poison-batch", "large-images")
"""Attacks of a limited key that are not part of `everything`: by killing processes, on another server."""
EVERYTHING = Attack(
    "everything", "all attacks of a limited key at once, with one key", BOB, lambda place, rng: Told(),
    "no process ends, no stream of another key is lost",
    goal=Goal(share=0.25, p99_gap_s=2.0, livez_s=5.0, recovery_s=20.0),
)  # fmt: skip
ALL = (*ATTACKS, EVERYTHING)


def main() -> int:
    """Runs the attacks and prints the table. Returns 1 if a goal was missed."""
    options = parse()
    end_in_order()
    chosen = [one for one in ALL if not options.only or one.name in options.only]
    if options.quick:
        chosen = [replace(one, seconds=max(5.0, one.seconds / 2)) for one in chosen]
    started, results, kind = time.monotonic(), list[Result](), ""
    for server in dict.fromkeys(one.server for one in chosen):
        with ExitStack() as stack:
            target = None if server == OWN else stack.enter_context(Target(server, LIMIT_MIB))
            kind = kind if target is None else target.memory.kind
            for one in chosen:
                if one.server == server:
                    results.append(attacked(one, target, options))
                    told = "; ".join(results[-1].misses) or results[-1].skipped
                    sys.stderr.write(f"{results[-1].verdict:8} {one.name:16} {told}\n")
    machine = facts()
    report = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "version": __version__,
        "machine": f"{machine['cores']} cores of {machine['cpu']}",
        "seed": options.seed,
        "minutes": options.minutes,
        "memory_limit": kind,
        "seconds": round(time.monotonic() - started),
        "results": [one.as_json() for one in results],
    }
    sys.stdout.write(page.section(report) + "\n")
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return int(any(one.verdict == "broken" for one in results))


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    names = [one.name for one in ALL]
    parser = argparse.ArgumentParser(prog="attack", description="Attacks on real servers, with goals.")
    parser.add_argument("--only", nargs="+", choices=names, default=[], metavar="NAME", help=", ".join(names))
    parser.add_argument("--quick", action="store_true", help="half the time for each attack, a minute for the last")
    parser.add_argument("--minutes", type=float, help="of `everything` (default: 10, with --quick 1)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args(argv)
    options.minutes = options.minutes or (1.0 if options.quick else 10.0)
    return options


def attacked(attack: Attack, target: Target | None, options: argparse.Namespace) -> Result:
    """Makes one attack and judges it. Before that, starts the server again if an earlier attack has ended it."""
    began = time.monotonic()
    if target is None:
        seen = seen_of(make([attack], Place(0, 0, "", options.seed, attack.seconds)))
    else:
        if not target.ready(READY_S):
            target.stop()
            target.start()
        seen = watched(attack, target, options)
    text = attack.text or "the other client is served"
    return judging.result(attack.name, attack.what, attack.attacker, attack.goal, text, seen, time.monotonic() - began)


def watched(attack: Attack, target: Target, options: argparse.Namespace) -> Seen:
    """Makes an attack, and returns what was seen of it and of the server meanwhile."""
    place = target.place(attack.seconds, options.seed)
    target.memory.take()
    if attack.goal == FIGURES_ONLY:
        seen = seen_of(make([attack], place))
    else:
        with Victim(place.port, place.alice, STREAMS) as victim:
            time.sleep(WARM_S)
            victim.window()
            time.sleep(CALM_S)
            calm = victim.window()
            crowd = [one for one in ATTACKS if one.attacker == BOB and one.name not in ALONE]
            everything = attack.name == EVERYTHING.name
            seen = seen_of(make(crowd, place, 60 * options.minutes) if everything else make([attack], place))
            seen.calm, seen.during = calm, victim.window()
            seen.recovery_s = recovery_s(victim, calm, attack.goal)
    seen.peak_mib, seen.ended = target.memory.take()
    if attack.restart:
        target.stop()
        target.start()
        time.sleep(attack.seconds / 2)
        peak, ended = target.memory.take()
        seen.peak_mib = {name: max(mib, peak.get(name, 0.0)) for name, mib in seen.peak_mib.items()}
        seen.ended = [*seen.ended, *ended]
    if seen.ended or seen.told.broken or attack.restart:
        target.renew()  # what one attack leaves behind would be seen in the next one
    seen.ended = [name for name in seen.ended if name not in attack.kills]
    return seen


def seen_of(made: Sequence[Made]) -> Seen:
    """Returns what an attack said. What several at once say is no miss: each has its goal when it is alone."""
    if len(made) == 1:
        return Seen(made[0].told, skipped=made[0].skipped)
    return Seen(Told({"said": [text for one in made for text in one.told.broken]}))


def recovery_s(victim: Victim, calm: Window, goal: Goal) -> float | None:
    """Returns the seconds until the victim has half its tokens per second again; None if that takes too long."""
    began, longest = time.monotonic(), goal.recovery_s or 0.0
    while time.monotonic() - began <= longest + LOOK_S:
        time.sleep(LOOK_S)
        if victim.window().tokens_per_s >= calm.tokens_per_s / 2:
            return round(time.monotonic() - began - LOOK_S, 1)
    return None


if __name__ == "__main__":
    sys.exit(main())
