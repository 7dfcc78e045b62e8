"""What the pages for users take for granted: commands on the PATH, models of a hub, files, and servers.

The models are small and random; they lie in the hub's cache under the names that the pages use. What a page writes
stays in a folder of that page.
"""

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.adapters import make_adapter, make_prompt_adapter
from tests.models import make_model
from tests.system.served import ROOT, Served
from tests.vision_models import make_vision_model

TEXT, VISION = "Qwen/Qwen3-0.6B", "Qwen/Qwen2.5-VL-3B-Instruct"
COMMIT = "0" * 40
_SHAPE: dict[str, Any] = {"intermediate_size": 192, "max_position_embeddings": 8192}
_ADDRESS = re.compile(r"\b(?:127\.0\.0\.1|localhost):(?:8000|11434)\b")
_PROCESS = re.compile(r" (\S+-\d+) \d+")
_PATH = re.compile(r"[\w./-]+[/.][\w./-]+")
_OWN_PORT = re.compile(r"--(?:port|host)")

_COMMAND = """#!/bin/bash
exec {python} -m antiphon "$@"
"""


class World:
    """The environment in which the blocks run, and the servers that they have started."""

    def __init__(self, at: Path) -> None:
        self._at = at
        self._servers: dict[tuple[str, ...], Served] = {}
        self._write_models()
        self._write_commands()

    def folder(self, page: Path) -> Path:
        """Returns the folder of a page, with the files that pages name."""
        folder = self._at / "pages" / f"{page.parent.name}-{page.stem}"
        if not folder.exists():
            folder.mkdir(parents=True)
            for name in ("adapters", "models"):
                (folder / name).symlink_to(self._at / name)
            for name in ("examples", "infra"):
                (folder / name).symlink_to(ROOT / name)
        return folder

    def environ(self, served: Served | None) -> dict[str, str]:
        """The variables of a block's commands. `served`: what the commands of clients ask."""
        own = {
            "PATH": f"{self._at / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "CURL_HOME": str(self._at / "bin"),
            "HF_HOME": str(self._at / "hub-home"),
            "HF_HUB_OFFLINE": "1",
            "ANTIPHON_SERVER": f"http://127.0.0.1:{served.port}" if served else "",
        }
        return {**os.environ, **own}

    @contextlib.contextmanager
    def keeping(self, *shared: tuple[str, ...]) -> Iterator[None]:
        """At the end, the servers that were started are stopped, except those with the flags `shared`."""
        try:
            yield
        finally:
            for flags in [flags for flags in self._servers if flags not in shared]:
                self._servers.pop(flags).stop()

    def server(self, flags: tuple[str, ...], folder: Path) -> Served:
        """Returns the server with these flags, which is started if it does not run. Its port is a free one."""
        kept = tuple(
            flag for flag, previous in zip(flags, ("", *flags), strict=False) if flag and not _is_port(flag, previous)
        )
        if kept not in self._servers:
            served = Served(*(self._absolute(flag, folder) for flag in kept))
            self._servers[kept] = served
            served.wait_for("Antiphon is ready")
            for name in _PROCESS.findall(next((line for line in served.lines if line.startswith("  processes ")), "")):
                served.wait_for(f" INFO {name} ready")
        return self._servers[kept]

    def _absolute(self, flag: str, folder: Path) -> str:
        """A flag that means the same in any folder: processes start sooner in that of the repository."""
        for name, model in self._models.items():
            flag = flag.replace(name, str(model))
        return _PATH.sub(lambda found: str(folder / found[0]) if (folder / found[0]).exists() else found[0], flag)

    def shell(self, text: str, served: Served | None, folder: Path) -> "subprocess.CompletedProcess[str]":
        """Runs shell code, in which the usual address stands for that of the server."""
        argv = ["bash", "-euo", "pipefail", "-c", addressed(text, served)]
        return subprocess.run(
            argv,
            cwd=folder,
            env=self.environ(served),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=90,
        )

    def _write_models(self) -> None:
        text = make_model(self._at / "models" / "qwen", "qwen3", **_SHAPE)
        make_model(self._at / "models" / "new", "qwen3", seed=1, **_SHAPE)
        vision = make_vision_model(self._at / "vision", "qwen2_5_vl")
        self._models = {TEXT: text, VISION: vision}
        for name, model in self._models.items():
            entry = self._at / "hub-home" / "hub" / f"models--{name.replace('/', '--')}"
            (entry / "refs").mkdir(parents=True)
            (entry / "refs" / "main").write_text(COMMIT)
            (entry / "snapshots").mkdir()
            (entry / "snapshots" / COMMIT).symlink_to(model)
        for seed, name in enumerate(("sql", "tales"), 1):
            make_adapter(self._at / "adapters" / name, text, seed=seed)
        make_prompt_adapter(self._at / "adapters" / "polite", text)

    def _write_commands(self) -> None:
        """`antiphon`, and a curl that fails for a status of 400."""
        (self._at / "bin").mkdir()
        (self._at / "bin" / ".curlrc").write_text("fail-with-body\nsilent\nshow-error\nmax-time = 60\n")
        command = self._at / "bin" / "antiphon"
        command.write_text(_COMMAND.format(python=sys.executable))
        command.chmod(0o755)


def addressed(text: str, served: Served | None) -> str:
    """Returns a block's text with a server's address in place of the usual one."""
    return _ADDRESS.sub(f"127.0.0.1:{served.port}", text) if served else text


def _is_port(flag: str, previous: str) -> bool:
    return bool(_OWN_PORT.fullmatch(flag) or _OWN_PORT.fullmatch(previous))
