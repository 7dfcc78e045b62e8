"""A hub on this machine: as much of the Hugging Face hub's HTTP as its client needs, for one model. And its cache."""

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub

NAME = "choir/alto"
COMMITS = {"main": "a" * 40, "v1": "b" * 40}


@dataclass
class Hub:
    """`files` of each commit; `asked` are the paths of all requests; `refusal` answers them with (status, code)."""

    files: dict[str, dict[str, bytes]]
    asked: list[str] = field(default_factory=list[str])
    refusal: tuple[int, str] | None = None
    url: str = ""


@contextlib.contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """The hub at a free port."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield hub
    finally:
        # The client would keep its connections, and use them for the next server that gets this port.
        huggingface_hub.close_session()
        server.shutdown()
        thread.join()
        server.server_close()


def write_cache(home: Path, files: dict[str, bytes], revision: str = "main") -> Path:
    """A cache below HF_HOME with one snapshot, laid out as the hub's client does it; gives the snapshot."""
    model = home / "hub" / f"models--{NAME.replace('/', '--')}"
    commit = COMMITS[revision]
    snapshot = model / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (model / "blobs").mkdir(exist_ok=True)
    (model / "refs").mkdir(exist_ok=True)
    (model / "refs" / revision).write_text(commit)
    for name, data in files.items():
        blob = model / "blobs" / _etag(data)
        blob.write_bytes(data)
        link = snapshot / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(Path(*[".."] * (2 + name.count("/"))) / "blobs" / blob.name)
    return snapshot


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""

    def _answer(self, body: bool) -> None:
        path = self.path.partition("?")[0]
        self.hub.asked.append(path)
        status, headers, data = self._find(path)
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(data)

    def _find(self, path: str) -> tuple[int, dict[str, str], bytes]:
        if self.hub.refusal is not None:
            status, code = self.hub.refusal
            return status, {"X-Error-Code": code, "X-Error-Message": code}, b"{}"
        words = path.strip("/").split("/")
        for prefix, answer in (("api/models/" + NAME, self._api), (NAME + "/resolve", self._file)):
            if path.strip("/").startswith(prefix + "/"):
                return answer(words[prefix.count("/") + 1 :])
        return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"

    def _api(self, words: list[str]) -> tuple[int, dict[str, str], bytes]:
        commit = COMMITS.get(words[1], words[1])
        if commit not in self.hub.files:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
        files = self.hub.files[commit]
        if words[0] == "tree":
            tree = [{"type": "file", "path": n, "size": len(d), "oid": _etag(d)} for n, d in files.items()]
            return 200, {"Content-Type": "application/json"}, json.dumps(tree).encode()
        facts = {"id": NAME, "sha": commit, "siblings": [{"rfilename": name} for name in files]}
        return 200, {"Content-Type": "application/json"}, json.dumps(facts).encode()

    def _file(self, words: list[str]) -> tuple[int, dict[str, str], bytes]:
        data = self.hub.files[words[0]]["/".join(words[1:])]
        return 200, {"ETag": f'"{_etag(data)}"', "X-Repo-Commit": words[0]}, data


def _etag(data: bytes) -> str:
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()
