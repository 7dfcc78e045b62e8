"""Settings of several devices and machines: mistakes are named before anything starts."""

import argparse
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from antiphon.cli import main
from antiphon.entrypoints.openai import api_server
from antiphon.launch import launcher
from antiphon.launch.other_machine import divided, rank_specs
from antiphon.offline.engine_args import engine_args
from antiphon.services.engine.executor.rank import RankSettings
from antiphon.settings import ServeSettings, check
from antiphon.shared.config import EngineSettings
from antiphon.shared.distributed import world
from antiphon.shared.distributed.machines import Machines, find_machines, interface_of, is_own, own_addresses
from antiphon.shared.flags import SettingsError, add_flags, parse

STARTS: dict[str, Callable[[Sequence[str]], int]] = {
    "serve": lambda words: main(["serve", *words]),
    "run": lambda words: main(["run", *words]),
    "direct": lambda words: api_server.main(["--model=/m", *words]),
}


@pytest.fixture(autouse=True)
def served(monkeypatch: pytest.MonkeyPatch) -> list[ServeSettings]:
    """The settings that passed the launcher's checks."""
    found: list[ServeSettings] = []

    def serve(settings: ServeSettings, _environ: object) -> int:
        check(settings)
        found.append(settings)
        return 0

    monkeypatch.delenv("TP", raising=False)
    monkeypatch.setattr(launcher, "serve", serve)
    return found


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize(
    "words",
    [
        ["--tensor-parallel-size", "1"], ["-tp=1"], ["-tp", "1"], ["--num_gpus=1"], ["-pp", "1"], ["--nnode=1"],
        ["--pipeline_parallel_size=1"], ["--pod-ips=192.0.2.1"], ["--pod_ips", "2001:db8::1"], ["--pod-ips="],
        ["--distributed-executor-backend", "mp"], ["--disable-custom-all-reduce"],
    ],
)  # fmt: skip
def test_one_device_is_what_an_engine_has(start: str, words: list[str], served: list[ServeSettings]) -> None:
    assert STARTS[start](words) == 0
    assert (
        served[0].parallel.tensor_parallel_size * served[0].parallel.pipeline_parallel_size * served[0].parallel.nnode
        == 1
    )


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--nnode=2", "--pod-ips=192.0.2.1,192.0.2.2", "-tp=3"], "--nnode 2: 3 processes (--tensor-parallel-size x"),
        (["--nnode=2", "--pod-ips=192.0.2.1,192.0.2.2", "-tp=2", "--node-rank=-1"], "--node-rank: -1 is not at least"),
        (["--master-port=0"], "--master-port: 0 is not a port between 1 and 65535"),
        (["--nnode=2"], "--pod-ips is needed, the addresses of all 2 machines"),
        (["--nnode=2", "--pod-ips=192.0.2.1"], "--pod-ips: 1 addresses for --nnode 2"),
        (["--pod-ips=192.0.2.1,192.0.2.2"], "--pod-ips: 2 addresses for --nnode 1"),
        (["--nnode=2", "--pod-ips=192.0.2.1,192.0.2.1"], "an address is given twice"),
        (["--nnode=2", "--pod-ips=192.0.2.1 192.0.2.2"], "is not an IP address"),
        (["--nnode=2", "--pod-ips=a,b"], "'a' is not an IP address"),
        (["-tp=0"], "--tensor-parallel-size: 0 is not at least 1"),
        (["-pp=-1"], "--pipeline-parallel-size: -1 is not at least 1"),
        (["--nnode=0"], "--nnode: 0 is not at least 1"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(
    start: str, words: list[str], said: str, served: list[ServeSettings], capsys: pytest.CaptureFixture[str]
) -> None:
    assert STARTS[start](words) == 78
    assert not served
    assert said in capsys.readouterr().err


@pytest.mark.spec("S-SRV-073", "S-SRV-074")
@pytest.mark.parametrize("start", STARTS)
def test_this_machine_is_the_one_whose_address_is_in_the_list(
    start: str, served: list[ServeSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NODE_RANK", raising=False)
    for listed, place in (("127.0.0.1,198.51.100.2", 0), ("198.51.100.2, 127.0.0.1", 1), ("::1,2001:db8::1", 0)):
        assert STARTS[start](["--nnode=2", f"--pod-ips={listed}", "-tp=2"]) == 0
        assert find_machines(served[-1].parallel).own == place
    both = ["--nnode=2", "--pod-ips=127.0.0.1,127.0.0.2", "-tp=2"]
    for words, found in ((both, "2"), ([both[0], "--pod-ips=198.51.100.200,198.51.100.201", both[2]], "none")):
        assert STARTS[start](words) == 0
        with pytest.raises(
            SettingsError, match=f"--pod-ips: {found} of .* and it must be exactly one: this machine has"
        ):
            find_machines(served[-1].parallel)
    monkeypatch.setenv("NODE_RANK", "1")
    assert STARTS[start](both) == 0
    assert find_machines(served[-1].parallel) == Machines(("127.0.0.1", "127.0.0.2"), 1)
    assert STARTS[start]([*both, "--node-rank=2"]) == 0
    with pytest.raises(SettingsError, match=r"--node-rank \(NODE_RANK\): 2 is not below the number of machines, 2"):
        find_machines(served[-1].parallel)


def test_a_machine_names_its_addresses_and_interfaces() -> None:
    named = own_addresses()
    assert "127.0.0.1" in named
    assert all(is_own(address) for address in named if not address.startswith("fe80"))
    assert not is_own("198.51.100.200")
    assert interface_of("127.0.0.1") == interface_of("127.0.0.9") == "lo"
    with pytest.raises(OSError, match="no network interface of this machine has the address"):
        interface_of("198.51.100.200")


def test_ranks_lie_one_machine_after_the_other() -> None:
    machines = Machines(("192.0.2.1", "192.0.2.2"), 1)
    assert [list(machines.ranks(machine, 4)) for machine in (0, 1)] == [[0, 1], [2, 3]]
    assert not machines.is_head
    assert machines.address == "192.0.2.2"


def test_without_degrees_a_model_is_divided_among_all_cards_of_all_machines() -> None:
    two = ServeSettings(nnode=2, pod_ips="192.0.2.1,192.0.2.2")
    for settings, cards, size in (
        (two, 0, 2), (two, 8, 16), (replace(two, engines=2), 8, 8), (replace(two, device="cpu"), 8, 2),
        (replace(two, tensor_parallel_size=4), 8, 4), (ServeSettings(), 8, 1),
    ):  # fmt: skip
        assert divided(settings, [str(card) for card in range(cards)]).parallel.tensor_parallel_size == size


def test_the_ranks_of_a_machine_know_the_ports_of_their_engines() -> None:
    model = ServeSettings(nnode=2, pod_ips="192.0.2.1,192.0.2.2", tensor_parallel_size=4, engines=2, node_rank=1)
    machines = find_machines(model.parallel)
    specs = list(rank_specs([model], machines, {"NODE_RANK": "1"}, ["0,1", "2,3"]))
    assert [spec.name for spec in specs] == [f"engine-{e}-rank-{r}" for e in (1, 2) for r in (2, 3)]
    assert [spec.environ["CUDA_VISIBLE_DEVICES"] for spec in specs if spec.environ] == ["0,1", "0,1", "2,3", "2,3"]
    ranks = [parse(RankSettings, arguments(spec.argv[4:]), {}) for spec in specs]
    assert [each.parallel.master_port for each in ranks] == [29500, 29500, 29501, 29501]
    assert [each.rank for each in ranks] == [2, 3, 2, 3]
    with socket.create_server(("127.0.0.1", 0)) as listening:
        head = launcher.make_plan([replace(model, node_rank=0)], {}, [listening], Path(), "")
    engines = [parse(EngineSettings, arguments(spec.argv[4:]), {}) for spec in head.specs if spec.service == "engine"]
    assert [each.parallel.master_port for each in engines] == [29500, 29501]


def arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_flags(parser, RankSettings)
    return parser.parse_args([*words])


@pytest.mark.parametrize("start", STARTS)
def test_the_variable_means_the_same_and_the_flag_beats_it(
    start: str, served: list[ServeSettings], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TP", "2")
    for words, size in (([], 2), (["--num-gpus=1"], 1), (["-tp", "4"], 4), (["--tensor-parallel-size=3"], 3)):
        assert STARTS[start](words) == 0
        assert served[-1].parallel.tensor_parallel_size == size
    assert STARTS[start](["-pp=3"]) == 0
    assert served[-1].parallel.pipeline_parallel_size == 3
    monkeypatch.setenv("TP", "two")
    assert STARTS[start]([]) == 78
    assert "environment variable TP: 'two' is not a valid int" in capsys.readouterr().err


@pytest.mark.spec("S-SRV-072", "S-SRV-107:distributed-executor-backend")
@pytest.mark.parametrize("start", STARTS)
def test_executors_are_ray_and_mp_and_ray_must_be_installed(
    start: str, served: list[ServeSettings], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit) as ended:
        STARTS[start](["--distributed-executor-backend=foo"])
    assert ended.value.code == 2
    assert "'ray', 'mp'" in capsys.readouterr().err
    ray = "--distributed-executor-backend=ray"
    monkeypatch.setattr(world, "has_ray", lambda: False)
    for words in ([ray], [ray, "-tp=2"]):
        assert STARTS[start](words) == 78
        assert (
            "ray is not installed here. Install it (pip install 'antiphon[ray]'), or use mp" in capsys.readouterr().err
        )
    monkeypatch.setattr(world, "has_ray", lambda: True)
    assert STARTS[start]([ray, "-tp=2"]) == 0
    assert STARTS[start]([ray, "-tp=2", "--nnode=2", "--pod-ips=192.0.2.1,192.0.2.2"]) == 78
    assert "ray: Ray knows its machines; leave out --nnode and --pod-ips" in capsys.readouterr().err
    assert STARTS[start](["--distributed-executor-backend=mp", "-tp=2"]) == 0
    assert world.notices(served[-1].parallel) == []
    assert STARTS[start](["--distributed-executor-backend=mp", "-tp=1"]) == 0
    assert world.notices(served[-1].parallel) == [
        "--distributed-executor-backend mp has no effect here: an engine on one device is one process"
    ]


@pytest.mark.spec("S-SRV-072")
def test_ray_is_used_where_it_is_asked_for_or_a_cluster_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = EngineSettings(), EngineSettings(tensor_parallel_size=2)
    ray, mp = (replace(two, distributed_executor_backend=name) for name in ("ray", "mp"))
    for installed in (True, False):
        monkeypatch.setattr(world, "has_ray", lambda installed=installed: installed)
        for environ in ({}, {"RAY_ADDRESS": ""}, {"RAY_ADDRESS": "192.0.2.1:6379"}):
            named = bool(environ.get("RAY_ADDRESS"))
            assert world.uses_ray(two.parallel, environ) == (named and installed)
            assert not world.uses_ray(one.parallel, environ)
            assert not world.uses_ray(mp.parallel, environ)
            assert not world.uses_ray(replace(two, nnode=2).parallel, environ)
            assert world.uses_ray(ray.parallel, environ)


@pytest.mark.spec("S-SRV-075")
def test_the_switch_for_the_all_reduce_is_accepted_and_said_to_have_no_effect(served: list[ServeSettings]) -> None:
    assert main(["serve"]) == main(["serve", "--disable-custom-all-reduce"]) == 0
    assert [each.parallel.disable_custom_all_reduce for each in served] == [False, True]
    assert [len(world.notices(each.parallel)) for each in served] == [0, 1]
    assert "has no effect here" in world.notices(served[1].parallel)[0]


@pytest.mark.spec("S-OFF-018")
def test_the_offline_api_has_the_same_switch() -> None:
    assert engine_args(model="m").disable_custom_all_reduce is False
    with pytest.warns(UserWarning, match="disable_custom_all_reduce has no effect here"):
        assert engine_args(model="m", disable_custom_all_reduce=True).disable_custom_all_reduce


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"tensor_parallel_size": 0}, "tensor_parallel_size: 0 is not at least 1"),
        ({"nnode": 2, "pod_ips": "a,b", "tensor_parallel_size": 2}, "pod_ips: 'a' is not an IP address"),
        (
            {"nnode": 2, "pod_ips": "192.0.2.1,192.0.2.2", "tensor_parallel_size": 2},
            "nnode 2: a model in a Python program is on the devices of one machine, or of a Ray cluster",
        ),
        ({"nnode": 2}, "nnode 2: pod_ips is needed"),
        ({"distributed_executor_backend": "foo"}, "'foo' is not one of auto, ray, mp"),
    ],
)
def test_the_offline_api_refuses_the_same(values: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        engine_args(model="m", **values)


def test_more_devices_than_there_are_is_said_before_the_rest() -> None:
    settings = ServeSettings(tensor_parallel_size=2, engines=2)
    with pytest.raises(ValueError, match=r"2 engines of 2 devices need 4, and 2 can be used here"):
        world.check_devices(settings.parallel, 2, 2)
    for found in (4, 0):
        world.check_devices(settings.parallel, 2, found)
