"""`antiphon replay`, `fork` and `record save`: repeats recorded requests, on a server or in this process."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

from antiphon.client import Client
from antiphon.shared.errors import ServiceError
from antiphon.shared.flags import SettingsError
from antiphon.shared.recorded_request import RecordedContent, decode, encode
from antiphon.terminal.exit_codes import CommandError
from antiphon.terminal.output import in_json, show

EQUAL, DIFFERENT = 0, 1


def save(client: Client, request: str, path: Path, *, as_json: bool = False) -> int:
    """Writes a recorded request to a file, with everything needed to repeat it. Raises CommandError."""
    content = fetched(client, request)
    try:
        path.write_bytes(encode(content) + b"\n")
    except OSError as error:
        raise CommandError(f"{path} cannot be written: {error.strerror}") from error
    prompts, outputs = len(content.prompts), len(content.sequences)
    facts = {"id": content.request_id, "prompts": prompts, "outputs": outputs, "file": str(path)}
    show(facts, [f"{content.request_id}: {prompts} prompts, {outputs} outputs, in {path}"], as_json=as_json)
    return 0


def run(client: Client, request: str, *, engine: str, model: str, as_json: bool = False) -> int:
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
    show(found, lines(found), as_json=as_json)
    return EQUAL if found["equal"] else DIFFERENT


def fork(client: Client, request: str, body: dict[str, Any], *, as_json: bool = False) -> int:
    """Continues a recorded output and prints the text as it arrives, or with `as_json` the whole answer at its end."""
    path = f"/v1/requests/{quote(request, safe='')}/fork"
    if as_json:
        print(in_json(client.post(path, body)))
        return 0
    for chunk in client.stream(path, body):
        print("".join(choice["text"] for choice in chunk["choices"]), end="", flush=True)
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
