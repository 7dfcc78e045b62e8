"""Cuts the power of a server in the middle of a batch, several times, and checks that nothing is lost.

    make power-cut ARGS="--items 1000 --cuts 2"

A batch of completions (greedy and seeded ones) runs undisturbed on one server. The same batch then runs on another one
with two processes of each service, whose files are in directories that stay. Each cut stops all its processes at one
moment, launcher and bus included (SIGSTOP, so that none can react to the end of another), kills them (SIGKILL), and
starts the server again. In the end every item must have exactly one answer, with the tokens of the undisturbed run.

What SIGKILL does not show is the loss of what the operating system had not written to the disk yet.
"""

import argparse
import json
import secrets
import sys
import tempfile
import time
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from bench.limits_of_machine import processes
from bench.serving import HOST, Serving, end_in_order

URL = "/v1/completions"
LIMIT_S = 600.0
"""Longest time for one run of the batch, seconds."""
POLL_S = 0.1
OUTPUT_TOKENS = (24, 72)
"""Fewest and most tokens of an answer."""


@dataclass(frozen=True)
class Report:
    """What became of the batch. `cuts`: number of answers that were written when each of the cuts came."""

    items: int
    cuts: tuple[int, ...]
    seconds: float
    status: str
    missing: tuple[str, ...]
    repeated: tuple[str, ...]
    failed: tuple[str, ...]
    different: tuple[str, ...]

    @property
    def good(self) -> bool:
        """Whether every item has exactly one answer, the right one."""
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
    connection = HTTPConnection(HOST, server.port, timeout=60)
    try:
        connection.request(method, path, body, {"Content-Type": content_type})
        answer = connection.getresponse()
        data = answer.read()
        if answer.status != 200:
            raise SystemExit(f"{method} {path}: {answer.status} {data.decode(errors='replace')}")
        return data
    finally:
        connection.close()


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


def compare(
    lines: list[dict[str, Any]], found: list[dict[str, Any]], right: dict[str, list[int] | None], **others: Any
) -> Report:
    """Returns the report on the answers `found`. `right`: each item's tokens; `others`: the report's other fields."""
    names = [line["custom_id"] for line in found]
    tokens = {line["custom_id"]: tokens_of(line) for line in found}
    return Report(
        items=len(lines),
        missing=tuple(line["custom_id"] for line in lines if line["custom_id"] not in tokens),
        repeated=tuple(sorted({name for name in names if names.count(name) > 1})),
        failed=tuple(name for name, one in tokens.items() if one is None),
        different=tuple(name for name, one in tokens.items() if one is not None and one != right.get(name)),
        **others,
    )


def cut(server: Serving) -> None:
    """Ends all processes of a server at one moment."""
    family = processes.tree(server.process.pid)
    processes.pause(server.process.pid)
    processes.kill(server.process.pid)
    server.process.wait()
    processes.end_orphans(family)


def run(items: int, cuts: int, flags: list[str]) -> Report:
    """Runs the batch without and with cuts. `flags`: further flags of the servers."""
    lines = make_lines(items)
    with Serving(*flags) as server:
        batch = wait_for(server, begin(server, lines), None)
        right = {line["custom_id"]: tokens_of(line) for line in answers(server, batch)}
    if batch["request_counts"]["completed"] != items:
        raise SystemExit(f"the undisturbed batch is not complete: {batch['request_counts']}")
    print(f"undisturbed: {items} answers", file=sys.stderr, flush=True)
    replicas = [f"--{service}=2" for service in ("gateways", "tokenizers", "engines", "detokenizers")]
    with tempfile.TemporaryDirectory() as kept:
        stores = [f"--files-directory={Path(kept) / 'files'}", f"--bus-directory={Path(kept) / 'bus'}"]
        every = [*flags, *replicas, *stores, "--stream-store=file"]
        began, seen, batch_id = time.monotonic(), list[int](), ""
        for number in range(cuts + 1):
            with Serving(*every) as server:
                batch_id = batch_id or begin(server, lines)
                wanted = items * (number + 1) // (cuts + 1) if number < cuts else None
                batch = wait_for(server, batch_id, wanted)
                if wanted is None:
                    found, seconds = answers(server, batch), time.monotonic() - began
                    return compare(
                        lines, found, right, cuts=tuple(seen), seconds=round(seconds, 1), status=batch["status"]
                    )
                seen.append(sum(batch["request_counts"][name] for name in ("completed", "failed")))
                cut(server)
                print(f"cut {number + 1}: after {seen[-1]} answers", file=sys.stderr, flush=True)
    raise AssertionError("the last round returns")


def main() -> int:
    """Parses the command line, runs, and prints the report. Returns 1 if an answer is missing or wrong."""
    parser = argparse.ArgumentParser(prog="power_cut", description="cuts the power in the middle of a batch")
    parser.add_argument("--items", type=int, default=1000, help="requests of the batch")
    parser.add_argument("--cuts", type=int, default=2, help="how often everything is killed")
    parser.add_argument("--model", default="", help="another model than the demo model")
    options = parser.parse_args()
    if options.items < 1 or options.cuts < 0:
        parser.error("--items must be at least 1 and --cuts at least 0")
    end_in_order()
    report = run(options.items, options.cuts, [f"--model={options.model}"] if options.model else [])
    print(f"{report.items} items, cut after {list(report.cuts)} answers, {report.status} after {report.seconds} s")
    for what in ("missing", "repeated", "failed", "different"):
        names = getattr(report, what)
        print(f"{what:<10} {len(names)}" + (f"  {', '.join(names[:5])}" if names else ""))
    return 0 if report.good else 1


if __name__ == "__main__":
    sys.exit(main())
