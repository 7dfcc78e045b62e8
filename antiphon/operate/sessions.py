"""`antiphon session`: exports sessions to files, imports, lists, continues and deletes them."""

import os
from pathlib import Path
from typing import Any
from urllib.parse import quote

from antiphon.client import Client
from antiphon.shared.flags import SettingsError
from antiphon.terminal.exit_codes import CommandError
from antiphon.terminal.output import in_json, show

KEY = "X-Antiphon-Session-Key"
PREFIX = "sess_"
KEY_VARIABLE = "ANTIPHON_SESSION_KEY"
_FILE_TYPE = "application/octet-stream"


def key_of(path: str) -> str:
    """Returns the key of a file: the content of `path`, or of the variable. Raises SettingsError."""
    if not path:
        if key := os.environ.get(KEY_VARIABLE, "").strip():
            return key
        raise SettingsError(
            f"--key-file: give the file with the key, or the key in {KEY_VARIABLE}: `openssl rand -hex 32` makes one"
        )
    try:
        key = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"--key-file: {path} cannot be read: {error}") from error
    if not key or not (key.isascii() and key.isprintable()):
        raise SettingsError(f"--key-file: {path} must have one line of printable ASCII characters")
    return key


def export(client: Client, name: str, path: Path, key: str, *, as_json: bool = False) -> int:
    """Writes a session to a file, which appears when it is whole. `name`: a session, or a recorded request."""
    session = client.get(_path(name)) if name.startswith(PREFIX) else client.post("/v1/sessions", {"id": name})
    draft = path.with_name(path.name + ".part")
    try:
        with draft.open("xb") as file:
            for piece in client.download(_path(session["id"]) + "/content", {KEY: key}):
                file.write(piece)
        draft.replace(path)
    except FileExistsError as error:
        raise CommandError(f"{draft} exists: another export writes it, or has left it behind; delete it") from error
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise CommandError(f"{path} cannot be written: {error.strerror or error}") from error
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    size = path.stat().st_size
    show({**session, "file": str(path), "bytes": size}, [f"{session['id']}: {size} bytes in {path}"], as_json=as_json)
    return 0


def load(client: Client, path: Path, key: str, *, as_json: bool = False) -> int:
    """Imports a file and prints the session's id here, and what became of its KV."""
    try:
        with path.open("rb") as file:
            session = client.upload("/v1/sessions", file, {KEY: key, "Content-Type": _FILE_TYPE})
    except OSError as error:
        raise CommandError(f"{path} cannot be read: {error.strerror or error}") from error
    show(session, [f"{session['id']}: {_size(session)}", f"  {_kv(session['kv'])}"], as_json=as_json)
    return 0


def list_all(client: Client, *, as_json: bool = False) -> int:
    """Prints the sessions of the key, the newest first."""
    found = client.get("/v1/sessions?limit=100")
    show(found, [f"{one['id']}  {one['model']}  {_size(one)}" for one in found["data"]], as_json=as_json)
    return 0


def delete(client: Client, session: str, *, as_json: bool = False) -> int:
    """Deletes a session at the server."""
    found = client.delete(_path(session))
    show(found, [f"{session} is deleted"], as_json=as_json)
    return 0


def proceed(client: Client, session: str, body: dict[str, Any], *, as_json: bool = False) -> int:
    """Continues a session and prints the text as it arrives, or with `as_json` the whole answer at its end."""
    path = _path(session) + "/continue"
    if as_json:
        print(in_json(client.post(path, body)))
        return 0
    for chunk in client.stream(path, body):
        print("".join(_text(choice) for choice in chunk["choices"]), end="", flush=True)
    print()
    return 0


def _text(choice: dict[str, Any]) -> str:
    return str(choice["text"] if "text" in choice else choice["delta"].get("content") or "")


def _path(session: str) -> str:
    return f"/v1/sessions/{quote(session, safe='')}"


def _size(session: dict[str, Any]) -> str:
    outputs = ", ".join(f"{one['tokens']} ({one['finish_reason'] or 'cut'})" for one in session["outputs"])
    return f"{sum(session['prompt_tokens'])} prompt tokens, output {outputs}"


def _kv(kv: dict[str, Any]) -> str:
    if kv["taken"] == kv["blocks"] and kv["blocks"]:
        return f"all {kv['blocks']} blocks of KV are here"
    rest = "the prompt is computed again" if not kv["taken"] else "the rest is computed again"
    return f"{kv['taken']} of {kv['blocks']} blocks of KV fit: {kv['reason']}; {rest}"
