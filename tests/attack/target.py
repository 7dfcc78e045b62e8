"""The servers that are attacked: `antiphon serve` with the demo model, as somebody would run it for several clients."""

import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.attack.memory import MemoryWatch
from tests.attack.place import Place
from tests.support import warm
from tests.system.served import READY_S, Served, alive

BOBS = 40
"""Keys for attackers, all with the same limits: each attack has one of its own, whose quota is untouched."""
BOB_LIMITS = "requests-per-minute = 60\ntokens-per-minute = 100000\nconcurrent-requests = 4\n"


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of server. `keys`: whether requests need a key; `few_files`: with few descriptors."""

    flags: tuple[str, ...] = ()
    keys: bool = True
    few_files: bool = False
    model: Callable[[Path], Path] | None = None
    """Makes the model in a directory; None: the demo model."""


def vision_model(directory: Path) -> Path:
    """Writes a small model that takes images."""
    from tests.vision_models import make_vision_model

    return make_vision_model(directory)


KINDS: Mapping[str, Kind] = {
    "keyed": Kind(("--gateways=2", "--record-content-mb=16")),
    "open": Kind(("--engines=2",), keys=False),
    "few-files": Kind(("--gateways=2",), few_files=True),
    "images": Kind(("--enable-mm", "--served-model-name=antiphon-demo"), model=vision_model),
}


@dataclass(slots=True)
class Keys:
    """The keys of a server: Alice without limits, Bobs with limits, and an administrator."""

    alice: str = field(default_factory=lambda: f"sk-alice-{secrets.token_hex(8)}")
    ops: str = field(default_factory=lambda: f"sk-ops-{secrets.token_hex(8)}")
    bobs: list[str] = field(default_factory=lambda: [f"sk-bob-{secrets.token_hex(8)}" for _ in range(BOBS)])

    def write(self, path: Path) -> None:
        """Writes the key file."""
        text = f'[[keys]]\nname = "alice"\nkey = "{self.alice}"\n\n[[keys]]\nname = "ops"\nkey = "{self.ops}"\n'
        text += 'scopes = ["admin"]\n'
        text += "".join(f'\n[[keys]]\nname = "bob-{n}"\nkey = "{key}"\n{BOB_LIMITS}' for n, key in enumerate(self.bobs))
        path.touch(mode=0o600)
        path.write_text(text, encoding="utf-8")


class Target:
    """A running server of a kind, with a limit of memory for each of its processes. A context manager."""

    def __init__(self, name: str, limit_mib: float) -> None:
        self.name, self.kind, self.keys = name, KINDS[name], Keys()
        self._limit_mib, self._next = limit_mib, 0
        self._directory = tempfile.TemporaryDirectory(prefix="attack-")
        self.folder = Path(self._directory.name)
        self.files = self.folder / "files"
        flags = [*self.kind.flags, f"--files-directory={self.files}"]
        if self.kind.keys:
            self.keys.write(self.folder / "keys.toml")
            flags.append(f"--api-keys-file={self.folder / 'keys.toml'}")
        if self.kind.model is not None:
            flags.append(f"--model={self.kind.model(self.folder / 'model')}")
        self._flags = flags
        self.start()

    def start(self) -> None:
        """Starts the server and waits until it is ready."""
        command = ("tests.attack.few_files", "serve") if self.kind.few_files else ("antiphon", "serve")
        self.served = Served(*self._flags, command=command, environ=warm.EXECUTED)
        try:
            self.served.wait_for("Antiphon is ready", READY_S)
        except BaseException:
            self.served.stop()
            raise
        self.memory = MemoryWatch(self.served.process.pid, self._limit_mib)

    def stop(self) -> None:
        """Stops the server; its files stay for another start."""
        self.served.stop()
        self.memory.close()

    def renew(self) -> None:
        """Starts the server again, without its files."""
        self.stop()
        shutil.rmtree(self.files, ignore_errors=True)
        self.start()

    def ready(self, timeout_s: float) -> bool:
        """Whether the server is ready, or becomes so in this time."""
        end = time.monotonic() + timeout_s
        place = self.place(0.0)
        while alive(self.served.process.pid):
            if place.ask("GET", "/readyz", timeout_s=5.0).status == 200:
                return True
            if time.monotonic() > end:
                return False
            time.sleep(0.2)
        return False

    def place(self, seconds: float, seed: int = 0) -> Place:
        """Returns what the next attack is given, with a key that no attack has used."""
        keys = self.kind.keys
        self._next += 1
        bob = self.keys.bobs[self._next % BOBS] if keys else ""
        return Place(
            self.served.port, self.served.process.pid, str(self.files), seed, seconds,
            self.keys.alice if keys else "", bob, self.keys.ops if keys else "",
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        self._directory.cleanup()
