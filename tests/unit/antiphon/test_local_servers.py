"""The servers of this user on this machine, and which of them a command means."""

import os
import socket
from pathlib import Path

import pytest

from antiphon.inspect.local_servers import local_servers
from antiphon.inspect.tap import find_bus
from antiphon.shared.flags import SettingsError
from antiphon.terminal.exit_codes import NotFoundError


def directory(parent: Path, pid: int, name: str = "abcd") -> Path:
    path = parent / f"antiphon-{pid}-{name}"
    path.mkdir()
    (path / "bus.url").write_text("nats://127.0.0.1:4222")
    return path


@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_a_launcher_is_found_with_the_addresses_on_which_it_listens(
    tmp_path: Path, family: socket.AddressFamily, host: str
) -> None:
    path = directory(tmp_path, os.getpid())
    with socket.create_server((host, 0), family=family) as listening:
        port = listening.getsockname()[1]
        [found] = local_servers(tmp_path)
        assert (found.pid, found.directory, found.bus) == (os.getpid(), path, path / "bus.url")
        assert f"http://{f'[{host}]' if ':' in host else host}:{port}" in found.urls
        assert found.listens_at(f"localhost:{port}")
    [found] = local_servers(tmp_path)
    assert not found.listens_at(f"http://127.0.0.1:{port}")


def test_the_directory_of_a_launcher_that_has_ended_is_no_server(tmp_path: Path) -> None:
    directory(tmp_path, 2**22 + 1)
    (tmp_path / "antiphon-notes").mkdir()
    assert local_servers(tmp_path) == []


def test_of_several_servers_one_is_chosen_by_its_address(tmp_path: Path) -> None:
    own, other = directory(tmp_path, os.getpid()), directory(tmp_path, os.getppid())
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        with pytest.raises(SettingsError, match="several servers run here, choose one of them") as refused:
            find_bus("", "", {}, tmp_path)
        lines = str(refused.value).splitlines()
        assert any(url in line and (own / "bus.url").as_uri() in line for line in lines)
        assert any((other / "bus.url").as_uri() in line for line in lines)
        assert find_bus("", "", {}, tmp_path, server=f"{url}/v1").credentials == str(own / "observer.credentials")
        with pytest.raises(NotFoundError, match="no server of this user listens at"):
            find_bus("", "", {}, tmp_path, server="http://127.0.0.1:1")
