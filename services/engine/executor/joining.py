"""How ranks of other machines connect to the first rank: over TCP, with mutual authentication by a shared key.

    first rank                                        other rank
    Challenge(nonce)              ->
                                  <-  Answer(rank, nonce, proof)
    Welcome(proof)                ->
                                  <-  Offer(settings)
    Refused(reason) or nothing    ->

A proof is an HMAC-SHA256 over both nonces, so a proof cannot be reflected to its sender. The key is never sent. Then
the connection is a `Channel`. It is not encrypted, like torch.distributed's own connections, so the machines need a
private network. Messages are small and bounded.
"""

import contextlib
import hmac
import logging
import secrets
import socket
import time
from collections.abc import Callable, Collection, Mapping
from typing import TypeVar

import msgspec

from antiphon.services.engine.executor.channel import ChannelClosed, receive_frame, send_frame
from antiphon.shared.config import EngineSettings
from antiphon.shared.flags import SettingsError, flags_of, values_of
from antiphon.shared.settings.bus import BusSettings
from antiphon.shared.version import __version__

logger = logging.getLogger(__name__)

NONCE_BYTES, FRAME_BYTES_MAX = 32, 256 * 1024
HANDSHAKE_S, CONNECT_S, RETRY_S, REMINDER_S = 5.0, 5.0, 1.0, 30.0
_KEEPALIVE = {"TCP_KEEPIDLE": 2, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}
_UNANSWERED_MS = 8_000
"""A machine that has not answered for about this long is considered dead."""
_OWN = {item.name for item in flags_of(BusSettings)} | {
    "model", "tokenizer", "download_dir", "threads", "node_rank", "master_port", "cluster_key_file", "kv_host",
    "kv_bind", "max_num_seqs",
}  # fmt: skip
"""Settings that may differ between machines: file paths, and settings that only the first rank uses."""
T = TypeVar("T", bound=msgspec.Struct)


class _Challenge(msgspec.Struct, frozen=True, tag=True):
    nonce: bytes


class _Answer(msgspec.Struct, frozen=True, tag=True):
    rank: int
    nonce: bytes
    proof: bytes


class _Welcome(msgspec.Struct, frozen=True, tag=True):
    proof: bytes


class _Offer(msgspec.Struct, frozen=True, tag=True):
    version: str
    settings: dict[str, str]


class _Verdict(msgspec.Struct, frozen=True, tag=True):
    """`refused`: the reason for refusing the rank; empty if it is accepted."""

    refused: str


class JoinRefused(Exception):
    """The first rank refuses this one; the message tells the user why."""


class Listener:
    """The first rank's side."""

    def __init__(self, address: str, port: int, key: bytes) -> None:
        """Listens. Raises SettingsError if the port cannot be used; port 0: any free one."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._key = key
        try:
            self._socket = socket.create_server((address, port), family=family)
        except OSError as error:
            raise SettingsError(
                f"--master-port: port {port} of {address} cannot be listened on ({error.strerror}); choose another one "
                "on every machine"
            ) from error
        self.port: int = self._socket.getsockname()[1]

    def gather(
        self,
        wanted: Mapping[int, str],
        settings: EngineSettings,
        check: Callable[[], None] = lambda: None,
    ) -> dict[int, socket.socket]:
        """Waits until all ranks have joined, and returns their connections.

        `wanted` maps each expected rank to its machine, for messages. `check` is called about every second; it may
        raise to end the wait.
        """
        joined: dict[int, socket.socket] = {}
        reminded_at = time.monotonic()
        _remind(wanted)
        try:
            while missing := [rank for rank in wanted if rank not in joined]:
                check()
                if time.monotonic() - reminded_at > REMINDER_S:
                    reminded_at = time.monotonic()
                    _remind({rank: wanted[rank] for rank in missing})
                for rank in [rank for rank, each in joined.items() if _has_ended(each)]:
                    logger.warning("rank %d on %s has left before the model was loaded", rank, wanted[rank])
                    joined.pop(rank).close()
                self._accept(joined, wanted, settings)
        except BaseException:
            for each in joined.values():
                each.close()
            raise
        return joined

    def close(self) -> None:
        """Stops listening. Connections stay."""
        self._socket.close()

    def _accept(self, joined: dict[int, socket.socket], wanted: Collection[int], settings: EngineSettings) -> None:
        """Accepts one connection, if there is one within RETRY_S.

        If a rank joins again, it replaces its former connection.
        """
        self._socket.settimeout(RETRY_S)
        try:
            end, (address, *_) = self._socket.accept()
        except TimeoutError:
            return
        try:
            end.settimeout(HANDSHAKE_S)
            rank = self._receive(end, wanted, settings)
        except (OSError, ChannelClosed, msgspec.DecodeError, JoinRefused) as error:
            logger.warning("a process at %s could not join: %s", address, error or type(error).__name__)
            end.close()
            return
        prepare(end)
        if rank in joined:
            joined[rank].close()
        joined[rank] = end
        logger.info("rank %d has joined from %s", rank, address)

    def _receive(self, end: socket.socket, wanted: Collection[int], settings: EngineSettings) -> int:
        nonce = secrets.token_bytes(NONCE_BYTES)
        _send(end, _Challenge(nonce))
        answer = _next(end, _Answer)
        if not hmac.compare_digest(answer.proof, _proof(self._key, "rank", nonce, answer.nonce, answer.rank)):
            _send(end, _Welcome(b""))
            raise JoinRefused("it has another key (--cluster-key-file)")
        _send(end, _Welcome(_proof(self._key, "head", nonce, answer.nonce, answer.rank)))
        offer = _next(end, _Offer)
        refused = difference(offer.version, offer.settings, settings)
        if answer.rank not in wanted:
            refused = f"rank {answer.rank} is not one of another machine; check --pod-ips and NODE_RANK"
        _send(end, _Verdict(refused))
        if refused:
            raise JoinRefused(refused)
        return answer.rank


def join(address: str, port: int, rank: int, settings: EngineSettings, key: bytes, *, tries: int = 0) -> socket.socket:
    """Connects to the first rank, and returns the connection. Waits for it, or tries `tries` times if that is not 0.

    Raises JoinRefused if the first rank refuses this one, and ConnectionError after the last try.
    """
    told, attempt = "", 0
    while True:
        attempt += 1
        try:
            end = socket.create_connection((address, port), CONNECT_S)
        except OSError as error:
            problem = f"waiting for the engine at {address} port {port} ({error.strerror or error})"
        else:
            try:
                end.settimeout(HANDSHAKE_S)
                _introduce(end, rank, settings, key)
            except (OSError, ChannelClosed, msgspec.DecodeError) as error:
                end.close()
                problem = f"the engine at {address} port {port} has ended the connection ({error})"
            except JoinRefused:
                end.close()
                raise
            else:
                prepare(end)
                return end
        if problem != told:
            told = problem
            logger.info("%s", problem)
        if attempt == tries:
            raise ConnectionError(problem)
        time.sleep(RETRY_S)


def prepare(end: socket.socket) -> None:
    """Configures a connection: blocking, no delay for small messages, keep-alives that detect a dead machine."""
    end.settimeout(None)
    if end.family not in (socket.AF_INET, socket.AF_INET6):
        return
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        end.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNANSWERED_MS)


def difference(version: str, theirs: Mapping[str, str], settings: EngineSettings) -> str:
    """Returns the difference because of which another rank cannot compute with this one; empty if there is none."""
    if version != __version__:
        return f"it has version {version}, and the first machine {__version__}; install the same"
    for name, value in offered(settings).items():
        other = theirs.get(name, "")
        if other != value:
            option = f"--{name.replace('_', '-')}"
            return f"{option} is {other} there and {value} at the first machine; start the same command on each"
    return ""


def offered(settings: EngineSettings) -> dict[str, str]:
    """Returns the settings that must be equal on all machines, as texts."""
    return {name: repr(value) for name, value in values_of(settings).items() if name not in _OWN}


def _introduce(end: socket.socket, rank: int, settings: EngineSettings, key: bytes) -> None:
    challenge, nonce = _next(end, _Challenge), secrets.token_bytes(NONCE_BYTES)
    _send(end, _Answer(rank, nonce, _proof(key, "rank", challenge.nonce, nonce, rank)))
    welcome = _next(end, _Welcome)
    if not hmac.compare_digest(welcome.proof, _proof(key, "head", challenge.nonce, nonce, rank)):
        raise JoinRefused("the engine at the first machine has another key (--cluster-key-file)")
    _send(end, _Offer(__version__, offered(settings)))
    verdict = _next(end, _Verdict)
    if verdict.refused:
        raise JoinRefused(f"the first machine refuses this one: {verdict.refused}")


def _proof(key: bytes, side: str, head: bytes, rank: bytes, number: int) -> bytes:
    return hmac.digest(key, b"antiphon rank\n%s\n%d\n" % (side.encode(), number) + head + rank, "sha256")


def _send(end: socket.socket, message: msgspec.Struct) -> None:
    send_frame(end, msgspec.msgpack.encode(message))


def _next(end: socket.socket, kind: type[T]) -> T:
    return msgspec.msgpack.decode(receive_frame(end, FRAME_BYTES_MAX), type=kind)


def _remind(wanted: Mapping[int, str]) -> None:
    if wanted:
        ranks = ", ".join(f"{rank} ({place})" for rank, place in wanted.items())
        logger.info("waiting for the ranks of other machines: %s", ranks)


def _has_ended(end: socket.socket) -> bool:
    """Whether the other side has closed a connection on which it has sent nothing yet."""
    end.setblocking(False)
    try:
        return not end.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        with contextlib.suppress(OSError):
            end.setblocking(True)
