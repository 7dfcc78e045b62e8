"""Rank tables: the files that the tool writes, the joined table, and what is wrong with a table."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from antiphon.cli import main
from antiphon.disaggregation.rank_table import read_global, read_local
from antiphon.shared.flags import SettingsError

ROOT = Path(__file__).resolve().parents[4]
TOOL = ROOT / "infra" / "llm_tools" / "PD_separate" / "pd_ranktable_tools.py"
IP = "192.0.2.10"


def made(folder: Path, *words: str, ip: str = IP) -> dict[str, Any]:
    """Runs the tool in its mode gen. Returns the tables by the names of their files."""
    assert main(["ranktable", "--mode", "gen", "--save-dir", str(folder), "--ip", ip, *words]) == 0
    return {path.name: json.loads(path.read_text()) for path in folder.iterdir()}


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The message of a call that ends with 2."""
    assert main(["ranktable", *words]) == 2
    return capsys.readouterr().err


def misused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The message of a call with wrong flags, which the parser or the command itself finds."""
    try:
        code = main(["ranktable", *words])
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    return capsys.readouterr().err


def scalars(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for each in value.values() for leaf in scalars(each)]
    return [leaf for each in value for leaf in scalars(each)] if isinstance(value, list) else [value]


@pytest.mark.spec("S-DIS-004", "S-DIS-010", "S-DIS-012", "S-DIS-013", "S-DIS-014", "S-DIS-016")
def test_gen_writes_a_global_table_and_a_local_one_for_each_instance(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """1p1d-tp2 with the service entry: two devices an instance, four in all."""
    words = ("--prefill-server-list", "4,5", "--decode-server-list", "6,7", "--api-server")
    tables = made(tmp_path / "new" / "save_dir", *words)
    names = {f"{part}_ranktable_{IP}{rest}.json" for part, rest in (("global", ""), ("local", "_host"))}
    assert set(tables) == names | {f"local_ranktable_{IP}_45.json", f"local_ranktable_{IP}_67.json"}
    assert {Path(line).name for line in capsys.readouterr().out.split()} == set(tables)
    groups = tables[f"global_ranktable_{IP}.json"]["server_group_list"]
    assert [[len(server.get("device", ())) for server in group["server_list"]] for group in groups] == [[0], [2], [2]]


def test_without_api_server_there_is_no_host_table_and_no_scheduler(tmp_path: Path) -> None:
    tables = made(tmp_path, "--prefill-server-list", "4")
    assert set(tables) == {f"global_ranktable_{IP}.json", f"local_ranktable_{IP}_4.json"}
    groups = tables[f"global_ranktable_{IP}.json"]["server_group_list"]
    assert [group["server_count"] for group in groups] == ["0", "1", "0"]


@pytest.mark.spec(
    "S-DIS-020", "S-DIS-021", "S-DIS-022", "S-DIS-023", "S-DIS-024", "S-DIS-025", "S-DIS-026", "S-DIS-027", "S-DIS-028"
)
@pytest.mark.spec("S-DIS-029")
def test_the_global_table_has_the_documented_fields_and_every_number_is_a_string(tmp_path: Path) -> None:
    words = ("--prefill-server-list", "4,5", "2", "--decode-server-list", "7", "--api-server")
    table = made(tmp_path, *words)[f"global_ranktable_{IP}.json"]
    name = os.uname().nodename

    def server(*ids: str) -> dict[str, Any]:
        devices = [{"device_id": each, "device_ip": IP, "rank_id": str(rank)} for rank, each in enumerate(ids)]
        return {"server_id": name, "server_ip": IP} | ({"device": devices} if ids else {})

    assert table == {
        "version": "1.0",
        "status": "completed",
        "server_group_list": [
            {"group_id": "0", "server_count": "1", "server_list": [server()]},
            {"group_id": "1", "server_count": "2", "server_list": [server("4", "5"), server("2")]},
            {"group_id": "2", "server_count": "1", "server_list": [server("7")]},
        ],
    }
    assert all(isinstance(value, str) for value in scalars(table))


@pytest.mark.spec("S-DIS-030", "S-DIS-031")
def test_local_tables_have_one_instance_as_it_stands_in_the_global_table(tmp_path: Path) -> None:
    tables = made(tmp_path, "--prefill-server-list", "4,5", "--decode-server-list", "6", "7", "--api-server")
    groups = tables[f"global_ranktable_{IP}.json"]["server_group_list"]
    instances = [server for group in groups for server in group["server_list"]]
    for name, instance in zip(("host", "45", "6", "7"), instances, strict=True):
        table = tables[f"local_ranktable_{IP}_{name}.json"]
        rest = {"version": "1.0", "status": "completed", "group_id": "0", "server_count": "1"}
        assert table == {**rest, "server_list": [instance]}
        read_local(tmp_path / f"local_ranktable_{IP}_{name}.json")
    assert "device" not in tables[f"local_ranktable_{IP}_host.json"]["server_list"][0]


@pytest.mark.parametrize(
    ("instances", "names"),
    [
        (["0,1", "2,3"], ["01", "23"]),
        (["10,11"], ["10-11"]),
        (["1,10", "3"], ["1-10", "3"]),
        (["1,2", "12"], ["1-2", "12"]),
    ],
)
@pytest.mark.spec("S-DIS-016")
def test_ids_in_names_are_joined_directly_unless_that_would_be_ambiguous(
    tmp_path: Path, instances: list[str], names: list[str]
) -> None:
    tables = made(tmp_path, "--prefill-server-list", *instances)
    assert set(tables) == {f"global_ranktable_{IP}.json", *(f"local_ranktable_{IP}_{name}.json" for name in names)}


@pytest.mark.spec("S-DIS-011")
def test_tables_are_written_where_save_dir_says_or_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["ranktable", "--mode=gen", "--api-server", f"--ip={IP}"]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {f"{kind}.json" for kind in names_with_host()}
    made(tmp_path / "there", "--api-server")
    assert main(["ranktable", "--mode=merge", "--global-ranktable-list", *pair(tmp_path / "two")]) == 0
    assert (tmp_path / "global_ranktable_merge.json").exists()
    (tmp_path / "file").write_text("")
    capsys.readouterr()
    assert "--save-dir" in refused(capsys, "--mode=gen", "--api-server", f"--save-dir={tmp_path / 'file'}")


def names_with_host() -> tuple[str, str]:
    return f"global_ranktable_{IP}", f"local_ranktable_{IP}_host"


def pair(folder: Path) -> list[str]:
    """The global tables of two machines, of which the first has the scheduler."""
    made(folder, "--prefill-server-list", "4", "--api-server")
    made(folder, "--prefill-server-list", "4", "--decode-server-list", "6,7", ip="192.0.2.11")
    return [str(folder / f"global_ranktable_{ip}.json") for ip in (IP, "192.0.2.11")]


@pytest.mark.spec("S-DIS-010", "S-DIS-015")
def test_merge_joins_the_tables_of_machines_group_by_group_in_their_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--mode", "merge", "--save-dir", str(tmp_path / "all"), "--global-ranktable-list", *pair(tmp_path)]
    assert main(["ranktable", *words]) == 0
    assert [path.name for path in (tmp_path / "all").iterdir()] == ["global_ranktable_merge.json"]
    table = read_global(tmp_path / "all" / "global_ranktable_merge.json")
    assert [group.server_count for group in table.server_group_list] == ["1", "2", "1"]
    assert [server.server_ip for server in table.servers("prefill")] == [IP, "192.0.2.11"]
    # The local tables stay as they are: each instance finds its own entry in the joined table.
    local = read_local(tmp_path / "local_ranktable_192.0.2.11_67.json")
    assert local.server_list[0] == table.servers("decode")[0]
    assert "--global-ranktable-list" in misused(capsys, "--mode", "merge")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--mode", "make"], "'make' (choose from 'gen', 'merge')"),
        (["--api-server"], "--mode"),
        (["--mode", "gen"], "at least one of --api-server, --prefill-server-list and --decode-server-list"),
        (["--mode=gen", "--api-server", "--global-ranktable-list", "a"], "--global-ranktable-list is for --mode merge"),
        (["--mode=merge", "--api-server"], "--api-server is for --mode gen"),
        (["--mode=merge", "--prefill-server-list", "1"], "--prefill-server-list is for --mode gen"),
        (["--mode=merge", "--decode-server-list", "1"], "--decode-server-list is for --mode gen"),
    ],
)
@pytest.mark.spec("S-DIS-010")
def test_flags_that_do_not_fit_the_mode_are_named(
    capsys: pytest.CaptureFixture[str], words: list[str], named: str
) -> None:
    assert named in misused(capsys, *words)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--prefill-server-list", "4,4"], f"device 4 of {IP} is listed 2 times"),
        (["--prefill-server-list", "4", "--decode-server-list", "4"], "a device belongs to one instance"),
        (["--prefill-server-list", "4,x"], "--prefill-server-list: '4,x' is not a list of device ids"),
        (["--decode-server-list", "4,"], "--decode-server-list: '4,' is not a list of device ids"),
        (["--decode-server-list", "-1"], "--decode-server-list: '-1' is not a list of device ids"),
        (["--decode-server-list", "04"], "'04' is not a list of device ids"),
    ],
)
@pytest.mark.spec("S-DIS-047")
def test_devices_that_cannot_be_are_refused(capsys: pytest.CaptureFixture[str], words: list[str], named: str) -> None:
    assert named in refused(capsys, "--mode=gen", f"--ip={IP}", *words)


def test_an_address_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--ip: 'a b' is neither" in refused(capsys, "--mode=gen", "--api-server", "--ip=a b")


@pytest.mark.spec("S-DIS-015")
def test_the_joined_table_must_be_a_whole_deployment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def merge(*paths: str) -> str:
        return refused(capsys, "--mode=merge", f"--save-dir={tmp_path}", "--global-ranktable-list", *paths)

    first, second = pair(tmp_path)
    assert "0 schedulers are listed" in merge(second)
    assert "no decode instance is listed" in merge(first)
    made(tmp_path / "third", "--decode-server-list", "1", "--api-server", ip="192.0.2.12")
    third = str(tmp_path / "third" / "global_ranktable_192.0.2.12.json")
    assert "2 schedulers are listed" in merge(first, second, third)
    assert "listed 2 times" in merge(first, second, second)
    assert "No such file" in merge(first, str(tmp_path / "none.json"))
    (tmp_path / "bad.json").write_text("{")
    assert "bad.json" in merge(first, str(tmp_path / "bad.json"))
    assert not (tmp_path / "global_ranktable_merge.json").exists()


def change(folder: Path, *, at: str, to: Any) -> Path:
    """A complete global table with one value changed: `at` is the path of it, `to` None removes it."""
    table = made(folder, "--prefill-server-list", "4,5", "--decode-server-list", "6", "--api-server")
    value: Any = table[f"global_ranktable_{IP}.json"]
    path = folder / "changed.json"
    *way, last = [int(word) if word.isdigit() else word for word in at.split(".")]
    inner = value
    for word in way:
        inner = inner[word]
    if to is None:
        del inner[last]
    else:
        inner[last] = to
    path.write_text(json.dumps(value))
    return path


@pytest.mark.parametrize(
    ("at", "to", "named"),
    [
        ("version", "2.0", "version is '2.0', not '1.0'"),
        ("status", "initializing", "status is 'initializing', not 'completed'"),
        ("server_group_list.2", None, "exactly 3"),
        ("server_group_list.1.group_id", "2", "in this order"),
        ("server_group_list.1.server_count", "2", "server_count is '2', and server_list has 1"),
        ("server_group_list.1.server_count", 1, "Expected `str`, got `int`"),
        ("server_group_list.1.server_list.0.device.1.rank_id", "2", "ranks count from 0"),
        ("server_group_list.1.server_list.0.device.0.rank_id", "1", "ranks count from 0"),
        ("server_group_list.1.server_list.0.device", [], "at least one device"),
        ("server_group_list.1.server_list.0.device", None, "at least one device"),
        ("server_group_list.1.server_list.0.device.0.device_id", "a", "device_id 'a' is not a number"),
        ("server_group_list.1.server_list.0.device.0.device_ip", "", "device_ip '' is neither"),
        ("server_group_list.1.server_list.0.server_ip", "a b", "server_ip 'a b' is neither"),
        ("server_group_list.1.server_list.0.server_id", "", "server_id is empty"),
        ("server_group_list.2.server_list.0.device.0.device_id", "5", "a device belongs to one instance"),
        ("server_group_list.0.server_list.0.device", [], "a scheduler has no field 'device'"),
    ],
)
@pytest.mark.spec("S-DIS-022", "S-DIS-023", "S-DIS-028", "S-DIS-046", "S-DIS-047")
def test_a_table_that_breaks_a_rule_is_refused_with_the_place(tmp_path: Path, at: str, to: Any, named: str) -> None:
    path = change(tmp_path, at=at, to=to)
    with pytest.raises(SettingsError) as raised:
        read_global(path)
    assert str(path) in str(raised.value)
    assert named in str(raised.value)


@pytest.mark.spec("S-DIS-046")
def test_a_table_with_two_schedulers_or_none_is_refused(tmp_path: Path) -> None:
    servers = [{"server_id": "a", "server_ip": "192.0.2.1"}, {"server_id": "b", "server_ip": "192.0.2.2"}]
    for count in (0, 2):
        group = {"group_id": "0", "server_count": str(count), "server_list": servers[:count]}
        with pytest.raises(SettingsError, match=f"{count} schedulers are listed; a deployment has exactly 1"):
            read_global(change(tmp_path / str(count), at="server_group_list.0", to=group))


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("group_id", "1", "group_id is '1'"),
        ("server_list", [], "exactly 1"),
        ("server_count", "2", "server_count is '2'"),
        ("status", "", "status is ''"),
    ],
)
def test_a_local_table_that_breaks_a_rule_is_refused(tmp_path: Path, field: str, value: Any, named: str) -> None:
    table = made(tmp_path, "--prefill-server-list", "4")[f"local_ranktable_{IP}_4.json"]
    path = tmp_path / "changed.json"
    path.write_text(json.dumps({**table, field: value}))
    with pytest.raises(SettingsError, match=named):
        read_local(path)


@pytest.mark.spec("S-DIS-010", "S-DIS-017")
def test_the_tool_runs_by_the_path_that_scripts_use(tmp_path: Path) -> None:
    environ = {**os.environ, "LLM_TOOLS_PATH": str(TOOL.parents[1]), "PYTHONPATH": ""}
    words = "--mode gen --prefill-server-list 4 --decode-server-list 6 --api-server --save-dir ./save_dir"
    command = f'"{sys.executable}" $LLM_TOOLS_PATH/PD_separate/pd_ranktable_tools.py {words}'
    done = subprocess.run(["sh", "-c", command], cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "save_dir").iterdir())) == 4
    ip = next((tmp_path / "save_dir").glob("global_*")).stem.removeprefix("global_ranktable_")
    table = read_global(tmp_path / "save_dir" / f"global_ranktable_{ip}.json")
    assert {server.server_ip for server in (*table.servers("prefill"), *table.servers("scheduler"))} == {ip}
    assert "hccn_tool" in done.stderr
