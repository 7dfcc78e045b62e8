"""`antiphon replay`, `fork` and `record save`: repeats recorded requests, on a server or in this process."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

from antiphon.client import Client
from antiphon.shared.errors import ServiceError
from antiphon.shared.flags import SettingsError
from antiphon.shared.recorded_request import RecordedContent, decode, encode

EQUAL, DIFFERENT = 0, 1


def save(client: Client, request: str, path: Path) -> int:
    """Writes a recorded request to a file, with everything needed to repeat it. Raises SettingsError."""
    content = fetched(client, request)
    try:
        path.write_bytes(encode(content) + b"\n")
    except OSError as error:
        raise SettingsError(f"{path} cannot be written: {error.strerror}") from error
    print(f"{content.request_id}: {len(content.prompts)} prompts, {len(content.sequences)} outputs, in {path}")
    return 0


def run(client: Client, request: str, *, engine: str, model: str) -> int:
    """Repeats a request, prints the comparison and returns EQUAL or DIFFERENT. Raises SettingsError.

    `request`: a file, or the id of a request that the server has recorded. `model`: directory of the model to load in
    this process; empty: the server runs the request, on the given engine if one is named.
    """
    content = read(Path(request)) if Path(request).is_file() else None
    if model:
        if engine:
            raise SettingsError("--engine names an engine of a server: leave it out with --model")
        from antiphon.operate.offline_replay import replay

        found = replay(content or fetched(client, request), model)
    elif content is not None:
        record = json.loads(encode(content))
        found = client.post("/v1/replay", {"record": record, "engine": engine or None})
    else:
        found = client.post(f"/v1/requests/{quote(request, safe='')}/replay", {"engine": engine or None})
    print("\n".join(lines(found)))
    return EQUAL if found["equal"] else DIFFERENT


def fork(client: Client, request: str, body: dict[str, Any]) -> int:
    """Continues a recorded output and prints the text as it arrives. Raises SettingsError."""
    for chunk in client.stream(f"/v1/requests/{quote(request, safe='')}/fork", body):
        sys.stdout.write("".join(choice["text"] for choice in chunk["choices"]))
        sys.stdout.flush()
    print()
    return 0


def lines(found: dict[str, Any]) -> Iterator[str]:
    """Yields the lines about a comparison."""
    where = f" on {', '.join(found['engines'])}" if found["engines"] else ""
    yield f"{found['id']} {'is equal' if found['equal'] else 'differs'}{where}"
    for one in found["sequences"]:
        if one["equal"]:
            yield f"  output {one['index']}: {one['num_tokens']} tokens, equal"
            continue
        yield f"  output {one['index']}: the first difference is at position {one['position']}"
        for side in ("recorded", "replayed"):
            yield f"    {side}: {_token(one[side])}"
        gap = one["logprob_gap"]
        if gap is not None:
            yield f"    gap of the log probabilities: {gap:.6f}"
        elif one["recorded"] and one["replayed"]:
            yield "    gap of the log probabilities: unknown, one of them is not among the likeliest tokens there"
    for name, what in (("model", "model"), ("configuration", "configuration of the engines")):
        if found[name]["recorded"] != found[name]["now"]:
            yield f"  the {what} was {_words(found[name]['recorded'])} and is {_words(found[name]['now'])}"


def fetched(client: Client, request: str) -> RecordedContent:
    """Returns the server's record of a request. Raises SettingsError."""
    return _decoded(json.dumps(client.get(f"/v1/requests/{quote(request, safe='')}/record")).encode())


def read(path: Path) -> RecordedContent:
    """Returns the recorded request in a file. Raises SettingsError for an invalid file."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error.strerror}") from error
    return _decoded(data)


def _decoded(data: bytes) -> RecordedContent:
    try:
        return decode(data)
    except ServiceError as error:
        raise SettingsError(error.message) from error


def _token(side: dict[str, Any] | None) -> str:
    if side is None:
        return "the end"
    logprob = "" if side["logprob"] is None else f", log probability {side['logprob']:.6f}"
    return f"token {side['token_id']} {side['text']!r}{logprob}"


def _words(value: Any) -> str:
    return ", ".join(value) if isinstance(value, list) else str(value)
