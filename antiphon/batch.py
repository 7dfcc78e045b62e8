"""`antiphon run-batch IN.jsonl OUT.jsonl`: sends the requests of a file in OpenAI's batch format, writes the answers.

The requests are sent over HTTP to a server that is already running or is started for the batch. Answers are written in
the order of the requests. If the output file exists, the batch is continued: requests that the file already answers are
not sent again. They run in the server's idle lane: interactive requests have precedence.

The lines of both files are described in `antiphon.shared.files.batch_lines`.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import Any

import msgspec

from antiphon.client import Client
from antiphon.shared.actors.python_command import python_command
from antiphon.shared.files import limits as file_limits
from antiphon.shared.files.batch_lines import (
    RETRIED,
    BatchLineError,
    BatchRequest,
    answer_lines,
    answered,
    encoded_answer,
    read_answer,
    read_request,
    request_lines,
    unanswered,
)
from antiphon.shared.flags import SettingsError
from antiphon.terminal.address import Address
from antiphon.terminal.exit_codes import CommandError
from antiphon.terminal.output import in_json

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
TRIES, PAUSE_S = 8, 0.5
"""Tries of a request, and seconds before the second one, if the server is overloaded or cannot be reached.

The pause doubles after each try.
"""
TIMEOUT_S = 3600.0


def run(
    source: Path, target: Path, address: Address | None, *, concurrency: int, model: str, as_json: bool = False
) -> int:
    """Sends every request of `source` that `target` does not answer yet, and appends the answers to `target`.

    `address`: the server; None: one is started with `model`. `as_json`: a summary is printed to standard output.
    Returns 0 if all requests have an answer with status 200, else 1. Raises SettingsError, before any request is sent,
    for a file that cannot be read or has an invalid line.
    """
    requests = read_requests(source)
    done = keep_whole_lines(target)
    left = [request for request in requests if request.custom_id not in done]
    print(f"{len(requests)} requests, {len(requests) - len(left)} answered already", file=sys.stderr)
    failed = sum(not ok for ok in done.values())
    if left:
        with _server(address, model) as client:
            failed += _answer(left, client, concurrency, target)
    if as_json:
        answered_before = len(requests) - len(left)
        good = len(requests) - failed
        counts = {"requests": len(requests), "answered_before": answered_before, "good": good, "failed": failed}
        print(in_json({**counts, "output": str(target)}), flush=True)
    if failed and left:
        print(f"{failed} requests have no good answer: their lines in {target} say why", file=sys.stderr)
    return int(failed > 0)


def _answer(requests: Sequence[BatchRequest], client: Client, concurrency: int, target: Path) -> int:
    """Appends the answers to a file, with a progress bar. Returns the number of those that are not good."""
    from tqdm.auto import tqdm

    failed = 0
    with target.open("ab") as out, tqdm(total=len(requests), desc="Answered requests", dynamic_ncols=True) as bar:
        for line in _answers(requests, client, concurrency):
            data, is_good = encoded_answer(line)
            out.write(data)
            out.flush()
            failed += not is_good
            bar.update()
    return failed


def read_requests(source: Path) -> list[BatchRequest]:
    """Returns the requests of a file. Raises SettingsError that names the first invalid line."""
    try:
        with source.open("rb") as file:
            lines = (line for line in request_lines(file) if not line.data.isspace())
            requests = [_request(line.data, f"{source}, line {line.number}") for line in lines]
    except OSError as error:
        raise SettingsError(f"{source} cannot be read: {error}") from error
    seen = set[str]()
    for request in requests:
        if request.custom_id in seen:
            raise SettingsError(f"{source}: custom_id {request.custom_id!r} is used twice")
        seen.add(request.custom_id)
    return requests


def keep_whole_lines(target: Path) -> dict[str, bool]:
    """Returns, for each custom_id with an answer in the file, whether the answer has status 200.

    An incomplete last line is removed from the file. Raises SettingsError if a line is not a batch answer.
    """
    done: dict[str, bool] = {}
    if not target.exists():
        return done
    with target.open("rb") as file:
        for line in answer_lines(file):
            if (answer := read_answer(line.data)) is not None:
                done[answer.custom_id] = answer.is_good
            elif len(line.data) <= file_limits.BATCH_ANSWER_BYTES_MAX and not line.data.endswith(b"\n"):
                os.truncate(target, line.start)  # The last one, of an interrupted run.
            elif not line.data.isspace():
                raise SettingsError(f"{target}, line {line.number} is no answer of a batch: name another file")
    return done


def _request(line: bytes, where: str) -> BatchRequest:
    try:
        return read_request(line, ENDPOINTS)
    except BatchLineError as error:
        raise SettingsError(f"{where}: {error}") from None


def _answers(requests: Sequence[BatchRequest], client: Client, concurrency: int) -> Iterator[dict[str, Any]]:
    """Yields the answer lines in the order of the requests, with at most `concurrency` requests in flight."""
    with ThreadPoolExecutor(concurrency, "batch") as pool:
        futures: list[Future[dict[str, Any]]] = [pool.submit(_ask, request, client) for request in requests]
        try:
            for future in futures:
                yield future.result()
        finally:
            for future in futures:
                future.cancel()


def _ask(request: BatchRequest, client: Client) -> dict[str, Any]:
    problem = ""
    for attempt in range(TRIES):
        if attempt:
            time.sleep(PAUSE_S * 2 ** (attempt - 1))
        try:
            with client.exchange("POST", request.url, request.body) as response:
                status, body = response.status, _json(response.read())
                request_id = response.headers.get("x-request-id", "")
        except (OSError, HTTPException) as error:
            problem = f"{type(error).__name__}: {error}"
            continue
        if status in RETRIED and attempt + 1 < TRIES:
            continue
        return answered(request.custom_id, status, request_id, body)
    return unanswered(request.custom_id, "server_unreachable", problem)


def _json(body: bytes) -> bytes:
    """Returns the body of a response as JSON: a text if it is none."""
    try:
        return bytes(msgspec.json.decode(body, type=msgspec.Raw))
    except msgspec.DecodeError:
        return msgspec.json.encode(body.decode("utf-8", "replace"))


@contextmanager
def _server(address: Address | None, model: str) -> Iterator[Client]:
    """Context manager that gives a client of a server, or of one that runs for the duration of the context."""

    def client(url: str, key: str = "", flag: str = "--server") -> Client:
        return Client(url, key, flag=flag, headers={"X-Antiphon-Lane": "idle"}, timeout_s=TIMEOUT_S)

    if address is not None:
        yield client(address.server, address.api_key, address.source)
        return
    argv = python_command("antiphon", "serve", "--port=0", *([f"--model={model}"] if model else []))
    # The server's log goes to this program's standard error; its address is read from its standard output.
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    try:
        yield client(_address(process))
    finally:
        process.terminate()
        process.wait()


def _address(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    for line in process.stdout:
        words = line.split()
        if words[:1] == ["URL"]:
            return words[1]
    raise CommandError("the server did not start: its messages above say why")
