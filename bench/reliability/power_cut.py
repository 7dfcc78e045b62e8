"""Cuts the power of a server under work that nobody waits for, several times, and checks that nothing is lost.

    make power-cut ARGS="--items 1000 --responses 20 --cuts 2 --json FILE"

A batch of completions, and responses in the background, run undisturbed on one server; some are greedy, some seeded.
The same work then runs on another one with two processes of each service, whose files are in directories that stay.
Each cut first stops all processes of the server, including launcher and bus (SIGSTOP, so that no process can react to
the end of another one), then kills them (SIGKILL), and starts the server again. The responses are started just before
the first cut; `open_at_cuts` of the report says how many of them had not ended at each cut. In the end every item must
have exactly one answer and every response must have ended exactly once, with the tokens of the undisturbed run.

What SIGKILL does not show is the loss of what the operating system had not written to the disk yet.
"""

import argparse
import json
import secrets
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from antiphon.client import Client
from bench.harness.output import save
from bench.harness.serving import HOST, Serving, end_in_order
from bench.limits_of_machine import processes

URL = "/v1/completions"
RESPONSES = "/v1/responses"
LIMIT_S = 600.0
"""Longest time for one run of the batch, seconds."""
POLL_S = 0.1
OUTPUT_TOKENS = (24, 72)
"""Fewest and most tokens of an answer of the batch."""
RESPONSE_TOKENS = 400
"""Tokens of a response in the background: many, so that it lasts until the cut."""
ENDED = ("completed", "incomplete", "failed", "cancelled")
"""States in which a response does not change any more."""


@dataclass(frozen=True)
class Report:
    """The result of the work. The names of responses begin with `response-`, the names of items with `item-`.

    `cuts`: number of answers of the batch that were written when each of the cuts came; `open_at_cuts`: number of
    responses that had not ended then.
    """

    items: int
    responses: int
    cuts: tuple[int, ...]
    open_at_cuts: tuple[int, ...]
    seconds: float
    status: str
    missing: tuple[str, ...]
    repeated: tuple[str, ...]
    failed: tuple[str, ...]
    different: tuple[str, ...]

    @property
    def good(self) -> bool:
        """Whether every item and every response has exactly one answer, the right one."""
        wrong = self.missing or self.repeated or self.failed or self.different
        return self.status == "completed" and not wrong


def make_lines(count: int) -> list[dict[str, Any]]:
    """Returns the lines of the input file. Half of the requests sample, each with a seed of its own."""
    least, most = OUTPUT_TOKENS
    return [
        {
            "custom_id": f"item-{number}",
            "method": "POST",
            "url": URL,
            "body": {
                "prompt": f"Tell me about number {number}.",
                "max_tokens": least + number * 7 % (most - least + 1),
                "ignore_eos": True,
                "temperature": number % 2,
                "seed": number,
                "return_token_ids": True,
            },
        }
        for number in range(count)
    ]


def ask(server: Serving, method: str, path: str, body: bytes = b"", content_type: str = "application/json") -> bytes:
    """Sends a request and returns the body of its answer. Raises SystemExit if it is refused."""
    client = Client(f"http://{HOST}:{server.port}", timeout_s=60)
    with client.exchange(method, path, body, {"Content-Type": content_type}) as answer:
        data = answer.read()
    if answer.status != 200:
        raise SystemExit(f"{method} {path}: {answer.status} {data.decode(errors='replace')}")
    return data


def begin(server: Serving, lines: list[dict[str, Any]]) -> str:
    """Uploads the lines and starts their batch. Returns its id."""
    boundary = secrets.token_hex(16)
    head = f'--{boundary}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--{boundary}\r\n'
    head += 'Content-Disposition: form-data; name="file"; filename="items.jsonl"\r\n\r\n'
    data = head + "\n".join(map(json.dumps, lines)) + f"\r\n--{boundary}--\r\n"
    form = f"multipart/form-data; boundary={boundary}"
    file_id = json.loads(ask(server, "POST", "/v1/files", data.encode(), form))["id"]
    wanted = {"input_file_id": file_id, "endpoint": URL, "completion_window": "24h"}
    return json.loads(ask(server, "POST", "/v1/batches", json.dumps(wanted).encode()))["id"]


def wait_for(server: Serving, batch_id: str, num_answers: int | None) -> dict[str, Any]:
    """Returns the batch when it has so many answers; None: when it has ended. Raises SystemExit after LIMIT_S."""
    deadline, counts = time.monotonic() + LIMIT_S, None
    while time.monotonic() < deadline:
        batch = json.loads(ask(server, "GET", f"/v1/batches/{batch_id}"))
        counts = batch["request_counts"]
        ended = batch["status"] in ("completed", "failed", "expired", "cancelled")
        if ended or (num_answers is not None and counts["completed"] + counts["failed"] >= num_answers):
            return batch
        time.sleep(POLL_S)
    raise SystemExit(f"the batch {batch_id} did not end within {LIMIT_S:.0f} s: {counts}")


def answers(server: Serving, batch: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the lines of both output files."""
    ids = [batch[name] for name in ("output_file_id", "error_file_id") if batch[name]]
    contents = (ask(server, "GET", f"/v1/files/{file_id}/content") for file_id in ids)
    return [json.loads(line) for content in contents for line in content.splitlines()]


def tokens_of(line: dict[str, Any]) -> list[int] | None:
    """Returns the output tokens of an answer; None if it has none, because the request failed."""
    response = line["response"]
    return response["body"]["choices"][0]["token_ids"] if response and response["status_code"] == 200 else None


def begin_responses(server: Serving, count: int) -> list[str]:
    """Starts responses in the background, half of which sample with a seed of their own. Returns their ids."""
    base = {"background": True, "max_output_tokens": RESPONSE_TOKENS, "ignore_eos": True, "top_logprobs": 0}
    base |= {"include": ["message.output_text.logprobs"]}
    ids: list[str] = []
    for number in range(count):
        body = {**base, "input": f"Tell me about number {number}.", "seed": number, "temperature": number % 2}
        ids.append(json.loads(ask(server, "POST", RESPONSES, json.dumps(body).encode()))["id"])
    return ids


def num_open(server: Serving, ids: list[str]) -> int:
    """Returns how many of these responses have not ended."""
    states = (json.loads(ask(server, "GET", f"{RESPONSES}/{each}"))["status"] for each in ids)
    return sum(state not in ENDED for state in states)


def wait_for_responses(server: Serving, ids: list[str]) -> list["Told"]:
    """Returns the result of each of these responses when all have ended. Raises SystemExit after LIMIT_S."""
    deadline = time.monotonic() + LIMIT_S
    while count := num_open(server, ids):
        if time.monotonic() > deadline:
            raise SystemExit(f"{count} responses did not end within {LIMIT_S:.0f} s")
        time.sleep(POLL_S)
    return [told_by(server, each) for each in ids]


@dataclass(frozen=True)
class Told:
    """A response that has ended: its tokens as bytes (None if it failed), and how many final events its stream has."""

    tokens: list[Any] | None
    num_ends: int


def told_by(server: Serving, response_id: str) -> Told:
    """Reads a response that has ended, and its stream of events from the beginning."""
    response = json.loads(ask(server, "GET", f"{RESPONSES}/{response_id}"))
    events = ask(server, "GET", f"{RESPONSES}/{response_id}?stream=true").decode().splitlines()
    num_ends = sum(line.partition("response.")[2] in ENDED for line in events if line.startswith("event: response."))
    parts = [part for item in response["output"] for part in item.get("content", ())]
    tokens = [one["bytes"] for part in parts for one in part["logprobs"]]
    whole = response["status"] in ("completed", "incomplete") and len(tokens) == response["usage"]["output_tokens"]
    return Told(tokens if whole else None, num_ends)


def compare(
    lines: list[dict[str, Any]],
    found: list[dict[str, Any]],
    right: dict[str, list[int] | None],
    responses: list[Told] | None = None,
    right_responses: list[Told] | None = None,
    **others: Any,
) -> Report:
    """Returns the report on the answers `found` and the `responses`.

    `right`, `right_responses`: what the undisturbed run had; `others`: the report's other fields.
    """
    names = [line["custom_id"] for line in found]
    tokens: dict[str, Any] = {line["custom_id"]: tokens_of(line) for line in found}
    expected: dict[str, Any] = dict(right)
    repeated = {name for name in names if names.count(name) > 1}
    missing = [line["custom_id"] for line in lines if line["custom_id"] not in tokens]
    for number, (told, undisturbed) in enumerate(zip(responses or [], right_responses or [], strict=True)):
        name = f"response-{number}"
        tokens[name], expected[name] = told.tokens, undisturbed.tokens
        missing += [name] if told.num_ends == 0 else []
        repeated |= {name} if told.num_ends > 1 else set()
    return Report(
        items=len(lines),
        responses=len(responses or []),
        missing=tuple(missing),
        repeated=tuple(sorted(repeated)),
        failed=tuple(name for name, one in tokens.items() if one is None),
        different=tuple(name for name, one in tokens.items() if one is not None and one != expected.get(name)),
        **others,
    )


def cut(server: Serving) -> None:
    """Ends all processes of a server at one moment."""
    family = processes.tree(server.process.pid)
    processes.pause(server.process.pid)
    processes.kill(server.process.pid)
    server.process.wait()
    processes.end_orphans(family)


def run(items: int, responses: int, cuts: int, flags: list[str]) -> Report:
    """Runs the work without and with cuts. `flags`: further flags of the servers."""
    lines = make_lines(items)
    with Serving(*flags) as server:
        batch_id = begin(server, lines)
        right_responses = wait_for_responses(server, begin_responses(server, responses))
        batch = wait_for(server, batch_id, None)
        right = {line["custom_id"]: tokens_of(line) for line in answers(server, batch)}
    if batch["request_counts"]["completed"] != items or not all(told.tokens for told in right_responses):
        raise SystemExit(f"the undisturbed work is not complete: {batch['request_counts']}, {right_responses}")
    print(f"undisturbed: {items} answers, {responses} responses", file=sys.stderr, flush=True)
    replicas = [f"--{service}=2" for service in ("gateways", "tokenizers", "engines", "detokenizers")]
    with tempfile.TemporaryDirectory() as kept:
        stores = [f"--files-directory={Path(kept) / 'files'}", f"--bus-directory={Path(kept) / 'bus'}"]
        every = [*flags, *replicas, *stores, "--stream-store=file"]
        began, seen, opened, batch_id, ids = time.monotonic(), list[int](), list[int](), "", list[str]()
        for number in range(cuts):
            with Serving(*every) as server:
                batch_id = batch_id or begin(server, lines)
                batch = wait_for(server, batch_id, items * (number + 1) // (cuts + 1))
                ids = ids or begin_responses(server, responses)
                opened.append(num_open(server, ids))
                seen.append(sum(batch["request_counts"][name] for name in ("completed", "failed")))
                cut(server)
                print(
                    f"cut {number + 1}: after {seen[-1]} answers, with {opened[-1]} responses under way",
                    file=sys.stderr,
                    flush=True,
                )
        with Serving(*every) as server:
            batch = wait_for(server, batch_id or begin(server, lines), None)
            told = wait_for_responses(server, ids or begin_responses(server, responses))
            found, seconds = answers(server, batch), time.monotonic() - began
    others = {"cuts": tuple(seen), "open_at_cuts": tuple(opened), "seconds": round(seconds, 1)}
    return compare(lines, found, right, told, right_responses, status=batch["status"], **others)


def table(report: Report) -> str:
    """Returns the report as lines of text."""
    head = f"{report.items} items, {report.responses} responses; cut after {list(report.cuts)} answers, with "
    rows = [f"{head}{list(report.open_at_cuts)} responses under way; {report.status} after {report.seconds} s"]
    for what in ("missing", "repeated", "failed", "different"):
        names = getattr(report, what)
        rows.append(f"{what:<10} {len(names)}" + (f"  {', '.join(names[:5])}" if names else ""))
    return "\n".join(rows)


def main() -> int:
    """Parses the command line, runs, and prints the report. Returns 1 if an answer is missing or wrong."""
    parser = argparse.ArgumentParser(prog="power_cut", description="cuts the power under a batch and responses")
    parser.add_argument("--items", type=int, default=1000, help="requests of the batch")
    parser.add_argument("--responses", type=int, default=20, help="responses in the background")
    parser.add_argument("--cuts", type=int, default=2, help="how often everything is killed")
    parser.add_argument("--model", default="", help="another model than the demo model")
    parser.add_argument("--json", type=Path, help="file for the report")
    options = parser.parse_args()
    if options.items < 1 or options.cuts < 0 or options.responses < 0:
        parser.error("--items must be at least 1, --responses and --cuts at least 0")
    end_in_order()
    flags = [f"--model={options.model}"] if options.model else []
    report = run(options.items, options.responses, options.cuts, flags)
    print(table(report))
    save(asdict(report), options.json)
    return 0 if report.good else 1


if __name__ == "__main__":
    sys.exit(main())
