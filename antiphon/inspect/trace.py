"""`antiphon trace`: the timeline of one request as text, or as a file for a trace viewer."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

from antiphon.client import Client
from antiphon.terminal.exit_codes import CommandError
from antiphon.terminal.output import show

BAR_CHARS = 40
MEANWHILE_NAMES = 5


def run(client: Client, request: str, *, steps: bool, as_json: bool = False) -> int:
    """Prints the timeline of a request, with `steps` also every step. Raises ServerError for an unknown request."""
    found = client.get(_path(request))
    show(found, lines(found, steps=steps), as_json=as_json)
    return 0


def save(client: Client, request: str, file: str, *, as_json: bool = False) -> int:
    """Writes the timeline in the Trace Event Format.

    Raises ServerError for an unknown request and CommandError for an unwritable file.
    """
    found = client.get(f"{_path(request)}?format=trace_events")
    try:
        Path(file).write_text(json.dumps(found), encoding="utf-8")
    except OSError as error:
        raise CommandError(f"--trace-events: cannot write {file} ({error.strerror})") from error
    count = len(found["traceEvents"])
    text = f"{file}: {count} events; open it at ui.perfetto.dev or speedscope.app"
    show({"file": file, "events": count}, [text], as_json=as_json)
    return 0


def _path(request: str) -> str:
    return f"/v1/requests/{quote(request, safe='')}/timeline"


def lines(found: dict[str, Any], *, steps: bool) -> Iterator[str]:
    """Yields the lines for one timeline (`GET /v1/requests/{id}/timeline`)."""
    failure = f" ({found['error_code']})" if found["error_code"] else ""
    yield f"{found['id']}  {found['state']}{failure}  {found['model']}  {_ms(found['duration_s'])}"
    yield (
        f"prompt {found['prompt_tokens']} tokens ({found['cached_tokens']} cached), output "
        f"{found['completion_tokens']}, first token {_ms(found['time_to_first_token_s'])}"
    )
    if found["explanation"]:
        yield " ".join(found["explanation"])
    if meanwhile := found.get("meanwhile"):
        names = [one["client_request_id"] or one["id"] for one in meanwhile["requests"][:MEANWHILE_NAMES]]
        yield f"{meanwhile['text']} Among them: {', '.join(names)}." if names else meanwhile["text"]
    yield ""
    total = sum(found["phases"].values()) or 1.0
    for name, seconds in found["phases"].items():
        mark = "  <- longest" if name == found["longest_phase"] else ""
        yield f"  {name:<14}{_ms(seconds):>12}  {'#' * round(BAR_CHARS * seconds / total)}{mark}"
    for sequence in found["sequences"]:
        for attempt in sequence["attempts"]:
            yield ""
            yield from _attempt(sequence["index"], attempt, steps)
    if found["dropped_events"]:
        yield f"\n{found['dropped_events']} events were not kept"


def _attempt(index: int, attempt: dict[str, Any], steps: bool) -> Iterator[str]:
    lost = f", lost at {_ms(attempt['lost_s'])}: {attempt['reason']}" if attempt["lost_s"] is not None else ""
    yield (
        f"sequence {index}, attempt {attempt['attempt']} on {attempt['engine']}: sent at {_ms(attempt['placed_s'])}, "
        f"{len(attempt['steps'])} steps{lost}"
    )
    shown = attempt["steps"] if steps else sorted(attempt["steps"], key=lambda step: -step["gap_s"])[:5]
    if shown:
        yield f"  {'step':>8} {'kind':<8} {'end':>11} {'gap':>11} {'tokens':>6} {'new':>4} {'batch':>5} {'waiting':>7}"
    for step in shown:
        note = "  preempted before it" if step["preempted_before"] else ""
        yield (
            f"  {step['step']:>8} {step['kind']:<8} {_ms(step['end_s']):>11} {_ms(step['gap_s']):>11} "
            f"{step['num_tokens']:>6} {step['num_output']:>4} {step['batch_size']:>5} {step['num_waiting']:>7}{note}"
        )
    if len(shown) < len(attempt["steps"]):
        yield "  (the longest gaps; --steps shows every step)"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.1f} ms"
