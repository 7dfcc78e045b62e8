"""What `antiphon serve` starts: every child's command line, environment and place on the bus."""

import argparse
import asyncio
import contextlib
import importlib.util
import os
import socket
import stat
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from antiphon.launch import launcher
from antiphon.launch.launcher import Place, Plan, VersionPlan, assign_gpus, engine_threads, make_plan, serve
from antiphon.launch.output import flush
from antiphon.launch.served_models import models_of
from antiphon.settings import MODEL_SERVICES, SERVICES, ServeSettings, check, child_environment
from antiphon.shared.actors.python_command import python_command
from antiphon.shared.config import DetokenizerSettings, EngineSettings
from antiphon.shared.errors import ServiceError
from antiphon.shared.flags import SettingsError, add_flags, converted, parse
from antiphon.shared.subjects import model_token
from antiphon.supervision import death_notice
from antiphon.supervision.fleet import Fleet
from antiphon.supervision.processes import ChildSpec
from antiphon.versions import supervisor
from tests.models import make_model


@pytest.fixture
def listeners() -> Iterator[list[socket.socket]]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    yield sockets
    for each in sockets:
        each.close()


@pytest.fixture
def planned(listeners: list[socket.socket], tmp_path: Path):
    def plan(settings: ServeSettings, binary: str = "/usr/bin/nats-server", **environ: str) -> Plan:
        return make_plan(models_of(settings), {"PATH": "/bin", **environ}, listeners, tmp_path, binary)

    return plan


def settings_of(spec: ChildSpec) -> Any:
    """What the child will understand."""
    kind = SERVICES[spec.service]
    parser = argparse.ArgumentParser()
    add_flags(parser, kind)
    return parse(kind, parser.parse_args(list(spec.argv)[4:]), spec.environ)


def test_a_plan_has_the_bus_and_as_many_of_each_service_as_asked(planned) -> None:
    plan = planned(ServeSettings(gateways=2, tokenizers=1, engines=3, detokenizers=2))
    names = [spec.name for spec in plan.specs]
    assert names == [
        "nats", "gateway-1", "gateway-2", "tokenizer-1",
        "engine-1", "engine-2", "engine-3", "detokenizer-1", "detokenizer-2",
    ]  # fmt: skip


def test_engines_and_gateways_have_standbys_if_there_are_several_or_if_asked(planned) -> None:
    def with_standbys(**settings: Any) -> list[str]:
        return [spec.name for spec in planned(ServeSettings(**settings)).specs if spec.standby_argv]

    assert with_standbys() == []
    assert with_standbys(gateways=2, tokenizers=2) == ["gateway-1", "gateway-2"]
    assert with_standbys(engines=2) == ["engine-1", "engine-2"]
    assert with_standbys(prefill=1, decode=1) == ["prefill-1", "decode-1"]
    assert with_standbys(engines=2, standby="off") == []
    assert with_standbys(standby="on") == ["gateway-1", "engine-1"]


def test_a_standby_becomes_the_same_process_as_its_child(planned) -> None:
    for spec in planned(ServeSettings(standby="on")).specs:
        if spec.standby_argv:
            words = list(spec.standby_argv)
            assert words[:4] == python_command("antiphon.shared.actors.standby")
            assert words[5:] == list(spec.argv)[3:]
            for module in words[4].split(","):
                assert importlib.util.find_spec(module) is not None


def test_without_gateways_the_models_are_for_those_on_the_bus_and_each_process_has_the_password_of_its_service(
    tmp_path: Path,
) -> None:
    (tmp_path / "drawn").mkdir()
    settings = ServeSettings(gateways=0, nats="nats://bus", nats_credentials=str(tmp_path / "drawn"))
    check(settings)
    plan = make_plan([settings], {}, [], tmp_path, "")
    assert [spec.name for spec in plan.specs] == ["tokenizer-1", "engine-1", "detokenizer-1"]
    assert (plan.port, plan.stores) == (0, None)
    for spec in plan.specs:
        assert settings_of(spec).nats_credentials == str(tmp_path / "drawn" / spec.service / "credentials")
    (tmp_path / "one").write_text("user:password")
    shared = make_plan([replace(settings, nats_credentials=str(tmp_path / "one"))], {}, [], tmp_path, "")
    assert {settings_of(spec).nats_credentials for spec in shared.specs} == {str(tmp_path / "one")}


def test_a_child_gets_by_flags_exactly_what_the_user_chose(planned) -> None:
    chosen = ServeSettings(max_num_seqs=7, dtype="float32", enable_prefix_caching=False, keep_alive_s=3.5, engines=1)
    for spec in planned(chosen).specs[1:]:
        parsed = settings_of(spec)
        expected = converted(chosen, SERVICES[spec.service])
        same = {
            "nats",
            "nats_credentials",
            "service_id",
            "listen_fd",
            "other_listen_fds",
            "default_model",
            "files_directory",
        }
        assert (
            replace(parsed, **{name: getattr(expected, name) for name in same if hasattr(expected, name)}) == expected
        )
        assert parsed.service_id == spec.name


def test_all_gateways_have_the_same_files(planned, tmp_path: Path) -> None:
    for chosen, expected in (("", str(tmp_path / "files")), ("/data", "/data")):
        plan = planned(ServeSettings(gateways=2, files_directory=chosen))
        gateways = [settings_of(spec) for spec in plan.specs if spec.service == "gateway"]
        assert [gateway.files_directory for gateway in gateways] == [expected] * 2


def test_a_variable_cannot_undo_a_flag_that_gives_the_default(planned) -> None:
    plan = planned(ServeSettings(dtype="auto"), DTYPE="bfloat16", MODEL_PATH="/other", OPENAI_API_KEYS="old")
    for spec in plan.specs:
        assert not {"DTYPE", "MODEL_PATH", "OPENAI_API_KEYS"} & set(spec.environ)
        assert spec.environ["PATH"] == "/bin"


@pytest.mark.spec("S-SRV-013")
def test_keys_and_passwords_are_on_no_command_line(planned, tmp_path: Path) -> None:
    plan = planned(ServeSettings(api_keys="secret-1, secret-2", usage_sink="https://host/secret"))
    elsewhere = planned(ServeSettings(nats="nats://user:secret@bus"), binary="")
    assert settings_of(elsewhere.specs[1]).nats == "nats://user:secret@bus"
    assert not any("secret" in word for spec in elsewhere.specs for word in spec.argv)
    passwords = {path.stem: path.read_text().split(":")[1] for path in tmp_path.glob("*.credentials")}
    later = {f"later-{role}" for role in MODEL_SERVICES}
    assert set(passwords) == {"launcher", "observer", "setup", *later, *(spec.name for spec in plan.specs[1:])}
    assert len(set(passwords.values())) == len(passwords)
    for spec in plan.specs:
        assert not any("secret" in word or word in passwords.values() for word in spec.argv)
        assert not any(password in word for word in spec.argv for password in passwords.values())
        for name in ("OPENAI_API_KEYS", "ANTIPHON_USAGE_SINK"):
            assert (name in spec.environ) == (spec.service == "gateway")
    assert plan.token == "secret-1"


def test_with_a_key_file_alone_the_launcher_has_a_key_of_its_own(planned) -> None:
    plan, again = (planned(ServeSettings(api_keys_file="keys.toml", gateways=2)) for _ in range(2))
    assert len(plan.token) >= 32
    assert plan.token != again.token
    for spec in plan.specs:
        assert (spec.environ.get("ANTIPHON_LAUNCHER_KEY") == plan.token) == (spec.service == "gateway")
        assert "OPENAI_API_KEYS" not in spec.environ
        assert not any(plan.token in word for word in spec.argv)
        assert ("--api-keys-file=keys.toml" in spec.argv) == (spec.service == "gateway")
    assert planned(ServeSettings(api_keys_file="keys.toml", api_keys="mine")).token == "mine"


def test_credentials_and_configuration_are_private_files(planned, tmp_path: Path) -> None:
    planned(ServeSettings())
    files = [tmp_path / "nats.conf", tmp_path / "bus.url", *tmp_path.glob("*.credentials")]
    assert len(files) == 13
    assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in files)


def test_each_process_has_a_user_of_its_own_on_the_bus(planned, tmp_path: Path) -> None:
    for spec in planned(ServeSettings(engines=2)).specs[1:]:
        path = Path(settings_of(spec).nats_credentials)
        assert path == tmp_path / f"{spec.name}.credentials"
        user, password = path.read_text().split(":")
        assert user == spec.name
        assert f'user: "{user}", password: "{password}"' in (tmp_path / "nats.conf").read_text()


def test_with_a_bus_elsewhere_none_is_started_and_names_are_unique_across_launchers(planned) -> None:
    plan = planned(ServeSettings(nats="nats://bus:4222", nats_credentials="/secret"), binary="")
    assert [spec.service for spec in plan.specs] == [name for name in SERVICES if name != "vision"]
    parsed = settings_of(plan.specs[2])
    assert (parsed.nats, parsed.nats_credentials) == ("nats://bus:4222", "/secret")
    assert parsed.service_id.endswith(f"-{os.getpid()}-engine-1")
    assert len(parsed.service_id) <= 64


def test_each_gateway_inherits_a_listening_socket_of_its_own(planned, listeners: list[socket.socket]) -> None:
    gateways = [spec for spec in planned(ServeSettings(gateways=3)).specs if spec.service == "gateway"]
    descriptors = [each.fileno() for each in listeners]
    assert [settings_of(spec).listen_fd for spec in gateways] == descriptors
    for spec, own in zip(gateways, descriptors, strict=True):
        others = [each for each in descriptors if each != own]
        assert settings_of(spec).other_listen_fds == ",".join(map(str, others))
        assert spec.pass_fds == (own, *others)


@pytest.mark.spec("S-SRV-014", "S-SRV-105:workers")
def test_as_many_engines_as_workers_each_with_its_gpu(planned, listeners: list[socket.socket], tmp_path: Path) -> None:
    settings = ServeSettings(engines=2)
    plan = make_plan([settings], {"CUDA_VISIBLE_DEVICES": "3,1"}, listeners, tmp_path, "", ("3", "1"))
    gpus = {spec.name: spec.environ["CUDA_VISIBLE_DEVICES"] for spec in plan.specs if spec.environ}
    assert gpus == {
        "gateway-1": "3,1", "tokenizer-1": "3,1", "engine-1": "3", "engine-2": "1", "detokenizer-1": "3,1",
    }  # fmt: skip


@pytest.mark.spec("S-SRV-031")
def test_gateways_draw_different_seeds_and_the_same_in_each_run(planned) -> None:
    plans = [planned(ServeSettings(gateways=2, seed=seed)) for seed in (5, None)]
    assert [[settings_of(spec).seed for spec in plan.specs[1:3]] for plan in plans] == [[5, 6], [None, None]]


@pytest.mark.spec("S-SRV-024")
def test_without_a_tokenizer_answers_carry_token_ids(planned) -> None:
    for asked, skipped, carried in ((False, False, False), (True, False, True), (False, True, True)):
        plan = planned(ServeSettings(return_token_ids=asked, skip_tokenizer_init=skipped))
        assert settings_of(plan.specs[1]).return_token_ids is carried
        assert settings_of(plan.specs[2]).skip_tokenizer_init is skipped


def test_engines_share_the_cores_unless_threads_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher.os, "sched_getaffinity", lambda _pid: set(range(8)))
    assert engine_threads(ServeSettings(), 1) == 0
    assert engine_threads(ServeSettings(), 3) == 2
    assert engine_threads(ServeSettings(), 16) == 1
    assert engine_threads(ServeSettings(threads=5), 3) == 5


TWO = ServeSettings(model="/a", served_model_name="a", engines=2, also=("/b=org/b.v1",), threads=0)
B = model_token("org/b.v1")


def test_each_model_has_its_own_processes_behind_the_same_gateways(planned) -> None:
    plan = planned(TWO)
    assert [spec.name for spec in plan.specs] == [
        "nats", "gateway-1", "tokenizer-1", "engine-1", "engine-2", "detokenizer-1",
        f"{B}-tokenizer-1", f"{B}-engine-1", f"{B}-engine-2", f"{B}-detokenizer-1",
    ]  # fmt: skip
    assert plan.models == ["a", "org/b.v1"]
    assert settings_of(plan.specs[1]).default_model == "a"
    for spec in plan.specs[2:]:
        parsed = settings_of(spec)
        assert parsed.service_id == spec.name
        expected = ("/a", "a") if spec.name[0] in "ted" else ("/b", "org/b.v1")
        assert (parsed.model, parsed.served_model_name) == expected
        assert spec.model == parsed.served_model_name


def test_engines_of_all_models_share_the_cores(planned, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher.os, "sched_getaffinity", lambda _pid: set(range(8)))
    engines = [spec for spec in planned(TWO).specs if spec.service == "engine"]
    assert [settings_of(spec).execution.threads for spec in engines] == [2, 2, 2, 2]


def test_engines_of_all_models_share_the_gpus(listeners: list[socket.socket], tmp_path: Path) -> None:
    file = tmp_path / "models.toml"
    rows = ('[[models]]\nmodel = "/b"\ndevice = "cpu"', '[[models]]\nmodel = "/c"')
    file.write_text("\n".join(rows))
    models = models_of(ServeSettings(model="/a", models=str(file)))
    gpus = assign_gpus(models, ["0", "1"])
    assert gpus.ids == ("0", "1")
    plan = make_plan(models, {}, listeners, tmp_path, "", gpus.ids)
    engines = [spec for spec in plan.specs if spec.service == "engine"]
    assert [(spec.environ or {}).get("CUDA_VISIBLE_DEVICES") for spec in engines] == ["0", None, "1"]
    with pytest.raises(SettingsError, match="2 engines need a GPU each, and 1 can"):
        assign_gpus(models, ["0"])
    assert assign_gpus([models[1]], ["0"]).ids == ()


def test_names_of_processes_fit_the_bus_however_long_the_model_s_name(planned) -> None:
    long = ServeSettings(nats="nats://bus:4222", also=(f"/b={'x' * 200}", f"/c={'x' * 199}y"), detokenizers=12)
    ids = [settings_of(spec).service_id for spec in planned(long, binary="").specs]
    assert len(set(ids)) == len(ids)
    assert max(map(len, ids)) <= 64


def test_a_service_gets_no_settings_of_another() -> None:
    part = converted(ServeSettings(max_num_seqs=7, model="/m"), DetokenizerSettings)
    assert part == DetokenizerSettings(model="/m")
    assert converted(ServeSettings(), EngineSettings, threads=3).execution.threads == 3


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        pytest.param(ServeSettings(engines=0), "--engines", marks=pytest.mark.spec("S-SRV-014")),
        (ServeSettings(gateways=65), "--gateways"),
        (ServeSettings(gateways=-1), "--gateways"),
        (ServeSettings(gateways=0), "--gateways=0 needs --nats"),
        pytest.param(ServeSettings(port=65536), "--port", marks=pytest.mark.spec("S-SRV-011")),
        pytest.param(ServeSettings(port=-1), "--port", marks=pytest.mark.spec("S-SRV-011")),
        (ServeSettings(nats_credentials="/f"), "--nats"),
        (ServeSettings(nats_tls_ca="/f"), "need --nats"),
        (ServeSettings(bus_replicas=3), "--bus-replicas needs --nats"),
        (ServeSettings(record_streams="all", stream_store="off"), "--record-streams=all needs a store"),
        (ServeSettings(bus_directory="/bus"), "add --stream-store=file, or leave --bus-directory out"),
        (ServeSettings(bus_directory="/bus", stream_store="off"), "--stream-store=off, which writes no files"),
        (ServeSettings(api_keys_file="/missing/keys.toml"), "--api-keys-file"),
    ],
)
def test_impossible_counts_and_ports_are_refused_by_name(settings: ServeSettings, named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        check(settings)


@pytest.mark.spec("S-SRV-011", "S-SRV-014")
@pytest.mark.parametrize("settings", [ServeSettings(port=port) for port in (0, 1, 65535)] + [ServeSettings(engines=1)])
def test_the_ends_of_the_ranges_are_allowed(settings: ServeSettings) -> None:
    check(settings)


def test_a_model_that_is_not_there_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="missing"):
        serve(ServeSettings(model=str(tmp_path / "missing")), {})


@pytest.mark.spec("S-SRV-101:ports")
def test_a_port_in_use_is_refused_before_anything_starts(listeners: list[socket.socket]) -> None:
    port = listeners[0].getsockname()[1]
    with pytest.raises(SettingsError, match=f"port {port} is in use"):
        serve(ServeSettings(port=port), {})


def test_the_environment_keeps_what_no_setting_reads() -> None:
    assert child_environment({"HOME": "/h", "MODEL_PATH": "/m"}, EXTRA="1") == {"HOME": "/h", "EXTRA": "1"}


@pytest.mark.parametrize(("wait_s", "is_ready"), [(600.0, True), (0.0, False)])
async def test_the_launcher_joins_the_bus_when_the_server_is_ready_or_takes_too_long(
    wait_s: float, is_ready: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined = asyncio.Event()

    @contextlib.asynccontextmanager
    async def join(*_: object) -> AsyncIterator[None]:
        joined.set()
        yield

    async def run(*_: object, **_named: object) -> None:
        pass

    monkeypatch.setattr(death_notice, "announced_deaths", join)
    monkeypatch.setattr(supervisor, "run", run)
    monkeypatch.setattr(launcher, "BUS_WAIT_S", wait_s)
    ready = asyncio.Event()
    announcing = asyncio.create_task(announced(ready))
    plan = VersionPlan(models=[ServeSettings()], environ={}, place=Place("nats://127.0.0.1:1", "", ""))
    versions = asyncio.create_task(launcher._use_bus(Fleet(launcher.print_line), plan, announcing))
    await asyncio.sleep(0)
    assert not joined.is_set()
    if is_ready:
        ready.set()
    await versions
    assert joined.is_set()
    announcing.cancel()


async def test_deaths_are_announced_although_versions_cannot_be_changed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    is_announcing, failed = False, asyncio.Event()

    @contextlib.asynccontextmanager
    async def announce(*_: object) -> AsyncIterator[None]:
        nonlocal is_announcing
        is_announcing = True
        yield
        is_announcing = False

    async def fail(*_: object, **_named: object) -> None:
        failed.set()
        raise ServiceError("internal_error", "no orders here")

    monkeypatch.setattr(death_notice, "announced_deaths", announce)
    monkeypatch.setattr(supervisor, "run", fail)
    ready = asyncio.create_task(asyncio.sleep(0))
    plan = VersionPlan(models=[ServeSettings()], environ={}, place=Place("nats://127.0.0.1:1", "", ""))
    running = asyncio.create_task(launcher._use_bus(Fleet(launcher.print_line), plan, ready))
    said = ""
    async with asyncio.timeout(60):
        await failed.wait()
        while "versions of models cannot be changed until the next start: no orders here" not in said:
            await asyncio.sleep(0.01)
            said += capsys.readouterr().err
    assert is_announcing
    assert not running.done()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


def test_another_version_may_be_named_by_the_path_of_the_first_one(tmp_path: Path) -> None:
    one, two = make_model(tmp_path / "one"), make_model(tmp_path / "two")
    models = [ServeSettings(model=str(one), device="cpu", served_model_alias="also")]
    plan = VersionPlan(models=models, environ={}, place=Place("nats://127.0.0.1:1", "", ""))
    specs = plan.specs("one", 2, str(two))
    [engine] = [settings_of(spec) for spec in specs if spec.service == "engine"]
    assert (engine.model, engine.served_model_alias.split(",")) == (str(two), ["also", str(one)])


def test_after_a_refusal_the_ends_of_the_other_services_are_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    output = launcher.Output()
    output.print("gateway-1", "2026-11-30T19:57:10.632Z INFO gateway-1 ready")
    output.only_problems = True
    output.print("gateway-1", "2026-11-30T19:57:10.632Z INFO gateway-1 draining")
    output.print("gateway-1", "2026-11-30T19:57:10.632Z ERROR gateway-1 it burns")
    flush()
    assert [line.split()[-1] for line in capsys.readouterr().err.splitlines()] == ["ready", "burns"]


async def announced(ready: asyncio.Event) -> None:
    await ready.wait()


@pytest.mark.parametrize(
    ("sizes", "why"),
    [
        ({"tensor_parallel_size": 3}, "--tensor-parallel-size: 3 does not divide the model's 4 attention heads"),
        ({"pipeline_parallel_size": 9}, "--pipeline-parallel-size: 9 is more than the model's 2 layers"),
    ],
)
def test_a_model_that_cannot_be_divided_is_refused_before_anything_starts(
    sizes: dict[str, Any], why: str, tmp_path: Path
) -> None:
    model = make_model(tmp_path / "model")
    with pytest.raises(SettingsError, match=why):
        launcher.located_models([ServeSettings(model=str(model), device="cpu", **sizes)], {})
    launcher.located_models([ServeSettings(model=str(model), device="cpu", tensor_parallel_size=2)], {})
