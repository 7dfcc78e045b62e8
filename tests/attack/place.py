"""What an attack is given, and how it asks the server: plain HTTP over the standard library, and raw connections.

An attack may send what no client library would, so nothing here checks what is sent. A request without an answer has
the status 0; an attacker does not mind.
"""

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

HOST = "127.0.0.1"
ANSWER_S = 30.0
BOUNDARY = "attack"
FORM = f"multipart/form-data; boundary={BOUNDARY}"


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer; status 0 if there was none, with the reason as body."""

    status: int
    body: bytes
    headers: Mapping[str, str]

    @property
    def json(self) -> Any:
        """Returns the body as JSON; an empty object if it is none."""
        with suppress(ValueError):
            return json.loads(self.body)
        return {}

    @property
    def failed(self) -> bool:
        """Whether the server failed, or gave no answer at all."""
        return self.status == 0 or (self.status >= 500 and self.status not in (503, 504, 507))

    @property
    def refused(self) -> bool:
        """Whether the server told the client that it does not do this (now)."""
        return 400 <= self.status < 500 or self.status in (503, 507)


@dataclass(frozen=True, slots=True)
class Place:
    """A server under attack. Keys are empty for a server without keys; `bob` is the attacker's."""

    port: int
    launcher: int
    files: str
    seed: int
    seconds: float
    """How long the attack may go on."""
    alice: str = ""
    bob: str = ""
    ops: str = ""
    model: str = "antiphon-demo"

    def until(self) -> Callable[[], bool]:
        """Returns a function that tells whether the time of the attack has not ended. It begins now."""
        end = time.monotonic() + self.seconds
        return lambda: time.monotonic() < end

    def ask(
        self, method: str, path: str, body: Any = None, *, key: str | None = None, timeout_s: float = ANSWER_S,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:  # fmt: skip
        """Sends one request on a connection of its own. `body`: bytes as they are, anything else as JSON."""
        sent = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        connection = http.client.HTTPConnection(HOST, self.port, timeout=timeout_s)
        try:
            data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            sent |= headers or {}
            host = sent.pop("Host", f"{HOST}:{self.port}")
            connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
            for name, value in {"Host": host, **sent, "Content-Length": str(len(data or b""))}.items():
                connection.putheader(name, value)
            connection.endheaders(data)
            answer = connection.getresponse()
            return Answer(answer.status, answer.read(), {k.lower(): v for k, v in answer.getheaders()})
        except (OSError, http.client.HTTPException) as error:
            return Answer(0, repr(error).encode(), {})
        finally:
            connection.close()

    def upload(self, data: bytes, *, key: str, disposition: str = 'name="file"; filename="a.jsonl"') -> Answer:
        """Uploads a file, with a form in which the file's part has this disposition."""
        return self.ask("POST", "/v1/files", form(data, disposition), key=key, headers={"Content-Type": FORM})

    def batch(self, file_id: str, *, key: str) -> Answer:
        """Starts a batch of completions."""
        wanted = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
        return self.ask("POST", "/v1/batches", wanted, key=key)

    def connect(self, timeout_s: float = ANSWER_S) -> socket.socket:
        """Returns a raw connection."""
        return socket.create_connection((HOST, self.port), timeout_s)

    def head(self, path: str, length: int, *, key: str = "", content_type: str = "application/json") -> bytes:
        """Returns the head of a POST whose body has (or would have) `length` bytes."""
        authorization = f"Authorization: Bearer {key}\r\n" if key else ""
        head = f"POST {path} HTTP/1.1\r\nHost: {HOST}:{self.port}\r\n{authorization}"
        return f"{head}Content-Type: {content_type}\r\nContent-Length: {length}\r\n\r\n".encode()

    def for_seconds(self, seconds: float) -> "Place":
        """Returns the place for an attack that takes so long."""
        return replace(self, seconds=seconds)


def form(data: bytes, disposition: str = 'name="file"; filename="a.jsonl"', epilogue: bytes = b"") -> bytes:
    """Returns the form of an upload for batches. `epilogue`: what follows its end."""
    purpose = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    head = f"{purpose}--{BOUNDARY}\r\nContent-Disposition: form-data; {disposition}\r\n\r\n"
    return head.encode("utf-8", "surrogatepass") + data + f"\r\n--{BOUNDARY}--\r\n".encode() + epilogue


def line(number: int, body: Mapping[str, Any], url: str = "/v1/completions") -> bytes:
    """Returns a line of a batch."""
    return json.dumps({"custom_id": f"r{number}", "method": "POST", "url": url, "body": body}).encode() + b"\n"


def together(count: int, work: Callable[[int], None]) -> None:
    """Runs `work` in `count` threads, each with its number, and returns when all have ended."""
    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def resident_mib(pid: int) -> float:
    """Returns the resident memory of a process; 0 if it has ended."""
    with suppress(OSError, ValueError, StopIteration):
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines()
        return next(int(one.split()[1]) for one in lines if one.startswith("VmRSS:")) / 1024
    return 0.0
