"""The place of an instance in its tables, and the rules that its settings must keep."""

import contextlib
import json
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from antiphon import cli
from antiphon.cli import main
from antiphon.disaggregation import start
from antiphon.disaggregation.instance import Deployment, check_lengths, check_ports, check_worker, read_deployment
from antiphon.disaggregation.join import sign
from antiphon.disaggregation.table_tool import generate, merge
from antiphon.settings import InstanceSettings
from antiphon.shared.distributed.cluster_key import read_key
from antiphon.shared.flags import SettingsError

IP, OTHER = "192.0.2.10", "192.0.2.11"
LLM_TOOLS = Path(cli.__file__).parents[1] / "infra" / "llm_tools"


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    """The tables of two prefill instances and a decode instance on one host."""
    generate(["4", "5"], ["6"], tmp_path, ip=IP, api_server=True)
    return tmp_path


def deployment_of(folder: Path, name: str, whole: str = f"global_ranktable_{IP}") -> Deployment:
    return read_deployment(str(folder / f"{whole}.json"), str(folder / f"local_ranktable_{name}.json"))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, InstanceSettings]]:
    """The roles that would be started, and with what; nothing starts."""
    found: list[tuple[str, InstanceSettings]] = []

    def note(deployment: Deployment, settings: InstanceSettings, _environ: object, _key: bytes) -> int:
        found.append((deployment.own.name, settings))
        return 0

    monkeypatch.setattr(start, "_scheduler", note)
    monkeypatch.setattr(start, "_worker", note)
    return found


@pytest.fixture
def role(tables: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., int]:
    """Calls `antiphon start-role` with the variables of one instance."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def call(name: str, *flags: str, **variables: str) -> int:
        local = tables / f"local_ranktable_{IP}_{name}.json"
        paths = {
            "GLOBAL_RANK_TABLE_FILE_PATH": str(tables / f"global_ranktable_{IP}.json"),
            "RANK_TABLE_FILE_PATH": str(local),
        }
        for variable, value in {**paths, **variables}.items():
            monkeypatch.setenv(variable, value)
        return main(["start-role", *flags])

    return call


@pytest.mark.spec("S-DIS-032", "S-DIS-033", "S-DIS-037")
def test_the_role_follows_from_the_tables(
    role: Callable[..., int], started: list[tuple[str, InstanceSettings]]
) -> None:
    assert [role(name) for name in ("4", "5", "6", "host")] == [0, 0, 0, 0]
    assert [name for name, _ in started] == ["prefill-1", "prefill-2", "decode-1", "scheduler"]


@pytest.mark.parametrize("variable", ["GLOBAL_RANK_TABLE_FILE_PATH", "RANK_TABLE_FILE_PATH"])
@pytest.mark.spec("S-DIS-032", "S-DIS-033")
def test_both_tables_are_needed(variable: str, role: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert role("4", **{variable: ""}) == 78
    assert f"{variable} is not set: export the path" in capsys.readouterr().err
    assert role("4", **{variable: "/missing.json"}) == 78
    assert "/missing.json cannot be read: No such file" in capsys.readouterr().err


def test_a_flag_beats_the_variable(
    role: Callable[..., int], started: list[tuple[str, InstanceSettings]], tables: Path
) -> None:
    assert role("4", f"--rank-table-file-path={tables / f'local_ranktable_{IP}_6.json'}") == 0
    assert started[0][0] == "decode-1"


@pytest.mark.spec("S-DIS-037", "S-DIS-041")
def test_a_local_table_that_differs_from_its_entry_or_has_none_is_refused(tables: Path) -> None:
    path = tables / f"local_ranktable_{IP}_4.json"
    table: Any = json.loads(path.read_text())
    server = table["server_list"][0]

    def refusal(**changes: Any) -> str:
        path.write_text(json.dumps({**table, "server_list": [{**server, **changes}]}))
        with pytest.raises(SettingsError) as raised:
            deployment_of(tables, f"{IP}_4")
        assert str(path) in str(raised.value)
        return str(raised.value)

    assert "differs from its entry in the global rank table" in refusal(server_id="another")
    two = [{"device_id": each, "device_ip": IP, "rank_id": str(rank)} for rank, each in enumerate("47")]
    assert "differs from its entry" in refusal(device=two)
    assert "is in no group of the global rank table" in refusal(server_ip=OTHER)
    assert "--mode merge" in refusal(device=[{**two[0], "device_id": "9"}])
    path.write_text(json.dumps({**table, "server_list": [{"server_id": "x", "server_ip": OTHER}]}))
    with pytest.raises(SettingsError, match="lists another one"):
        deployment_of(tables, f"{IP}_4")


def test_local_tables_find_their_place_in_the_joined_table(tmp_path: Path) -> None:
    first = generate(["0"], [], tmp_path, ip=IP, api_server=True)[0]
    second = generate(["0"], ["1"], tmp_path, ip=OTHER, api_server=False)[0]
    merge([first, second], tmp_path)
    names = [f"{IP}_0", f"{OTHER}_0", f"{OTHER}_1", f"{IP}_host"]
    found = [deployment_of(tmp_path, name, "global_ranktable_merge") for name in names]
    assert [each.own.name for each in found] == ["prefill-1", "prefill-2", "decode-1", "scheduler"]
    assert len({each.digest for each in found}) == 1
    assert not found[0].has_one_host
    with pytest.raises(SettingsError, match="0 schedulers are listed"):
        deployment_of(tmp_path, f"{OTHER}_0", f"global_ranktable_{OTHER}")


@pytest.mark.parametrize(
    ("ports", "own", "said"),
    [
        ("", 9000, "NODE_PORTS is not set: export the --port of each instance, by commas, for prefill-1, prefill-2"),
        ("8088,8089", 9000, "has 2 ports, and the global rank table 3 instances"),
        ("1,2,3,4", 9000, "has 4 ports"),
        ("8088,x,8090", 9000, "'x' is not a port"),
        ("8088,0,8090", 9000, "'0' is not a port"),
        ("8088,65536,8090", 9000, "'65536' is not a port"),
        (
            "8088,8089,8088",
            9000,
            "prefill-1 and decode-1 have the same port 8088; prefill and decode instances may not",
        ),
        ("8088,8088,8090", 9000, f"prefill-1 and prefill-2 on {IP} have the same port 8088; instances of a host need"),
        ("8088,8089,8090", 8089, "--port: 8089 is the port of prefill-2 on the same host"),
    ],
)
@pytest.mark.spec("S-DIS-034", "S-DIS-042", "S-DIS-043", "S-SRV-101:roles")
def test_ports_that_cannot_be_are_refused(tables: Path, ports: str, own: int, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        check_ports(deployment_of(tables, f"{IP}_host"), ports, own)


@pytest.mark.spec("S-DIS-042", "S-SRV-101:roles")
def test_prefill_and_decode_may_not_share_a_port_even_on_different_hosts_but_equals_may(tmp_path: Path) -> None:
    first = generate(["0"], ["1"], tmp_path, ip=IP, api_server=True)[0]
    second = generate(["0"], [], tmp_path, ip=OTHER, api_server=False)[0]
    merge([first, second], tmp_path)
    deployment = deployment_of(tmp_path, f"{IP}_host", "global_ranktable_merge")
    assert check_ports(deployment, " 8088, 8088,8089", 9000) == [8088, 8088, 8089]
    with pytest.raises(SettingsError, match="prefill-2 and decode-1 have the same port 8089"):
        check_ports(deployment, "8088,8089,8089", 9000)


@pytest.mark.spec("S-DIS-034")
def test_node_ports_mean_nothing_to_the_other_instances(
    role: Callable[..., int], started: list[tuple[str, InstanceSettings]]
) -> None:
    assert role("4", NODE_PORTS="nonsense") == 0


@pytest.mark.parametrize("name", ["4", "6", "host"])
@pytest.mark.spec("S-DIS-044")
def test_steps_shorter_than_the_context_are_refused(
    name: str,
    role: Callable[..., int],
    started: list[tuple[str, InstanceSettings]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    short = ("--max-model-len=4096", "--max-num-batched-tokens=4095")
    for flags in (short, (*short, "--enable-chunked-prefill=false")):
        assert role(name, *flags) == 78
        assert "--max-num-batched-tokens: 4095 is less than --max-model-len 4096; 4096 or 8192 is recommended" in (
            capsys.readouterr().err
        )
    assert role(name, "--max-model-len=4096", "--max-num-batched-tokens=4096") == 0
    assert role(name, *short, "--enable-chunked-prefill") == 0
    check_lengths(None, 4096)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ["--tensor-parallel-size=2"],
            r"--tensor-parallel-size .*: 2 is not the number of devices .* gives as 1 \(4\)",
        ),
        (["-pp=2"], r"pipeline-parallel-size\): 2 is not the number of devices"),
        (["--engines=2"], r"--engines \(--worker-num\): 2; an instance has one engine"),
        (["--port=0"], "the scheduler reaches this instance by its port"),
        (["--host=127.0.0.1"], f"at 127.0.0.1 the scheduler does not reach this instance, whose server_ip is {IP}"),
        (["--also=/m=x"], "serves one model"),
        (["--models=/m.toml"], "serves one model"),
        (["--role=decode"], "the rank tables decide the role"),
    ],
)
@pytest.mark.spec("S-DIS-048")
def test_settings_that_contradict_the_tables_are_refused(
    flags: list[str], said: str, role: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert role("4", *flags) == 78
    assert re.search(said, capsys.readouterr().err)


@pytest.mark.spec("S-DIS-048")
def test_an_instance_of_two_devices_needs_a_tensor_parallel_size_of_two(
    role: Callable[..., int], tables: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    generate(["4,5"], ["6,7"], tables, ip=IP, api_server=True)
    assert role("45", "--tensor-parallel-size=1") == 78
    assert "1 is not the number of devices of this instance, which the rank table gives as 2 (4,5)" in (
        capsys.readouterr().err
    )
    check_worker(deployment_of(tables, f"{IP}_45").own, host="0.0.0.0", port=8088, engines=1, devices=2)


@pytest.mark.spec("S-DIS-026", "S-DIS-055")
def test_an_instance_sees_the_gpus_of_its_table() -> None:
    seen = start._visible_devices
    assert seen(("4", "5"), "auto", {"CUDA_VISIBLE_DEVICES": "4,5,6"}) == {"CUDA_VISIBLE_DEVICES": "4,5"}
    assert seen(("4",), "cpu", {"CUDA_VISIBLE_DEVICES": "0"}) == {}
    with pytest.raises(SettingsError, match="device 5 is not here: this process can use 4, 6"):
        seen(("4", "5"), "cuda", {"CUDA_VISIBLE_DEVICES": "4,6"})


@pytest.mark.spec("S-DIS-047")
def test_a_device_belongs_to_one_running_instance() -> None:
    def claim(device: int) -> contextlib.AbstractContextManager[None]:
        return start._claimed(f"device-{os.getpid()}-{device}", f"device {device} is in use")

    with claim(4):
        with pytest.raises(SettingsError, match="device 4 is in use: stop that one"), claim(4):
            raise AssertionError
        with claim(5):
            pass
    with claim(4):
        pass


@pytest.mark.spec("S-DIS-017")
def test_the_tools_path_is_checked_and_printed(
    role: Callable[..., int],
    started: list[tuple[str, InstanceSettings]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["tools-path"]) == 0
    printed = capsys.readouterr().out.strip()
    assert Path(printed) == LLM_TOOLS
    assert {path.name for path in (LLM_TOOLS / "PD_separate").glob("*.*")} == set(start.TOOLS)
    assert role("4", LLM_TOOLS_PATH=printed) == 0
    assert role("4", LLM_TOOLS_PATH=str(tmp_path)) == 78
    assert f"LLM_TOOLS_PATH: {tmp_path} has no PD_separate" in capsys.readouterr().err


def test_the_key_is_private_long_and_the_same_for_all_instances_of_a_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    key = read_key("", one_host=True, why="")
    assert key == read_key("", one_host=True, why="")
    assert len(key) == 64
    path = tmp_path / "antiphon" / "cluster.key"
    assert [each.name for each in path.parent.iterdir()] == ["cluster.key"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_key(str(path), one_host=False, why="there are two") == key
    with pytest.raises(SettingsError, match="--cluster-key-file is needed, since the rank table has several hosts"):
        read_key("", one_host=False, why="the rank table has several hosts")
    path.chmod(0o640)
    with pytest.raises(SettingsError, match="chmod 600"):
        read_key(str(path), one_host=False, why="there are two")
    short = tmp_path / "short"
    short.write_text("secret")
    short.chmod(0o600)
    for name, said in ((short, "at least 16"), (tmp_path / "none", "No such file")):
        with pytest.raises(SettingsError, match=said):
            read_key(str(name), one_host=True, why="")
    assert sign(key, "join", b"x") != sign(key, "joined", b"x")
