"""Settings of several devices and machines: mistakes are named, degrees above 1 are refused with a reason."""

from collections.abc import Callable, Sequence

import pytest

from antiphon import launcher
from antiphon.cli import main
from antiphon.entrypoints.openai import api_server
from antiphon.offline.engine_args import engine_args
from antiphon.settings import ServeSettings, check
from shared import parallel

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
    assert served[0].tensor_parallel_size * served[0].pipeline_parallel_size * served[0].nnode == 1


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--nnode=2", "--pod-ips=192.0.2.1,192.0.2.2"], "--nnode 2 is not supported here"),
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


@pytest.mark.parametrize("refusal", parallel.REFUSALS, ids=lambda refusal: refusal.field)
def test_each_reason_says_what_to_use_instead(refusal: parallel.Refusal) -> None:
    assert "--engines (--worker-num)" in refusal.reason or "--nats" in refusal.reason


@pytest.mark.parametrize("start", STARTS)
def test_the_variable_means_the_same_and_the_flag_beats_it(
    start: str, served: list[ServeSettings], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TP", "2")
    for words, size in (([], 2), (["--num-gpus=1"], 1), (["-tp", "4"], 4), (["--tensor-parallel-size=3"], 3)):
        assert STARTS[start](words) == 0
        assert served[-1].tensor_parallel_size == size
    assert STARTS[start](["-pp=3"]) == 0
    assert served[-1].pipeline_parallel_size == 3
    monkeypatch.setenv("TP", "two")
    assert STARTS[start]([]) == 78
    assert "environment variable TP: 'two' is not a valid int" in capsys.readouterr().err


@pytest.mark.parametrize("start", STARTS)
def test_executors_are_ray_and_mp_and_ray_must_be_installed(
    start: str, served: list[ServeSettings], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit) as ended:
        STARTS[start](["--distributed-executor-backend=foo"])
    assert ended.value.code == 2
    assert "'ray', 'mp'" in capsys.readouterr().err
    monkeypatch.setattr(parallel.importlib.util, "find_spec", lambda _name: None)
    assert STARTS[start](["--distributed-executor-backend=ray"]) == 78
    assert "ray is not installed" in capsys.readouterr().err
    monkeypatch.setattr(parallel.importlib.util, "find_spec", lambda _name: object())
    assert STARTS[start](["--distributed-executor-backend=ray"]) == 78
    assert "started by the engine itself. Leave the option out, or use mp" in capsys.readouterr().err
    assert STARTS[start](["--distributed-executor-backend=mp", "-tp=2"]) == 0
    assert parallel.notices(served[-1]) == []
    assert STARTS[start](["--distributed-executor-backend=mp", "-tp=1"]) == 0
    assert parallel.notices(served[-1]) == [
        "--distributed-executor-backend mp has no effect here: an engine on one device is one process"
    ]


@pytest.mark.spec("S-SRV-075")
def test_the_switch_for_the_all_reduce_is_accepted_and_said_to_have_no_effect(served: list[ServeSettings]) -> None:
    assert main(["serve"]) == main(["serve", "--disable-custom-all-reduce"]) == 0
    assert [each.disable_custom_all_reduce for each in served] == [False, True]
    assert [len(parallel.notices(each)) for each in served] == [0, 1]
    assert "has no effect here" in parallel.notices(served[1])[0]


@pytest.mark.spec("S-OFF-018")
def test_the_offline_api_has_the_same_switch() -> None:
    assert engine_args(model="m").disable_custom_all_reduce is False
    with pytest.warns(UserWarning, match="disable_custom_all_reduce has no effect here"):
        assert engine_args(model="m", disable_custom_all_reduce=True).disable_custom_all_reduce


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"tensor_parallel_size": 0}, "tensor_parallel_size: 0 is not at least 1"),
        ({"nnode": 2, "pod_ips": "192.0.2.1,192.0.2.2"}, "nnode 2 is not supported here"),
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
        parallel.check_devices(settings, 2, 2)
    for found in (4, 0):
        parallel.check_devices(settings, 2, found)
