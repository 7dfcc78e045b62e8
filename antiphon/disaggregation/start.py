"""`antiphon start-role`: starts one instance of a deployment with separate prefill and decode instances.

The same command and settings start every instance; the rank tables decide whether it is the scheduler, a prefill or a
decode instance. `start_servers.sh` calls it.
"""

import argparse
import asyncio
import contextlib
import socket
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from antiphon.disaggregation.instance import Deployment, check_lengths, check_ports, check_worker, read_deployment
from antiphon.disaggregation.join import bus_secret
from antiphon.disaggregation.scheduler import Gathering, new_epoch
from antiphon.disaggregation.worker import Worker
from antiphon.launch import devices, launcher, nats_server, sockets
from antiphon.launch.run_directory import run_directory
from antiphon.launch.served_models import models_of
from antiphon.settings import InstanceSettings, check
from antiphon.shared.distributed import world
from antiphon.shared.distributed.cluster_key import read_key
from antiphon.shared.flags import SettingsError, parse
from antiphon.supervision.fleet import Failure

TOOLS = ("pd_ranktable_tools.py", "start_servers.sh")


def run(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Starts the instance that the settings and tables describe; returns the exit code. Raises SettingsError."""
    settings = parse(InstanceSettings, options, environ)
    _check_tools(settings.llm_tools_path)
    deployment = read_deployment(settings.global_rank_table_file_path, settings.rank_table_file_path)
    if settings.also or settings.models:
        raise SettingsError("--also, --models: an instance of a deployment serves one model, that of --model")
    if settings.kv_transfer.role != "both":
        raise SettingsError("--role: the rank tables decide the role of an instance; leave it out")
    if settings.prefill or settings.decode:
        raise SettingsError("--prefill, --decode: the rank tables say which instances there are; leave them out")
    if not options.enable_chunked_prefill:
        # A step may have fewer tokens than the longest context only if the user gave --enable-chunked-prefill.
        check_lengths(settings.scheduler.max_num_batched_tokens, settings.scheduler.max_model_len)
    if settings.parallel.nnode > 1:
        raise SettingsError("--nnode: an instance of a deployment has one machine; leave it out, with --pod-ips")
    why = "the rank table has several hosts"
    key = read_key(settings.parallel.cluster_key_file, one_host=deployment.has_one_host, why=why)
    start = _scheduler if deployment.own.role == "scheduler" else _worker
    return start(deployment, settings, environ, key)


def _scheduler(deployment: Deployment, settings: InstanceSettings, environ: Mapping[str, str], key: bytes) -> int:
    ports = check_ports(deployment, settings.node_ports, settings.port)
    names = ",".join(worker.name for worker in deployment.workers())
    # The scheduler has no engine, so settings of devices could not apply.
    settings = replace(settings, tensor_parallel_size=1, pipeline_parallel_size=1, required_engines=names)
    model = _prepared(settings, environ)
    binary, epoch = "" if settings.nats else nats_server.find_binary(), new_epoch()
    with contextlib.ExitStack() as stack:
        # Instances follow the scheduler that started last, so a second scheduler would take them from the first.
        stack.enter_context(
            _claimed(f"scheduler-{deployment.digest[:32]}", "a scheduler of this deployment runs already")
        )
        listeners = sockets.listen(settings.host, settings.port, settings.gateways)
        stack.callback(sockets.close, listeners)
        directory = stack.enter_context(run_directory())
        bus, url = None, ""
        if binary:
            everywhere = "127.0.0.1" if deployment.has_one_host else "0.0.0.0"
            secret = bus_secret(key, epoch)
            bus = nats_server.prepare(
                directory, host=everywhere, secret=secret, namespace=settings.namespace, moves=False
            )
            for worker in deployment.workers():
                bus.join("engine", worker.name)
            url = _bus_url(bus.url, deployment)
        plan = launcher.make_plan([replace(model, engines=0)], environ, listeners, directory, binary, (), bus)
        plan = replace(plan, versions=None)  # other instances start the engines
        gathering = Gathering(
            deployment=deployment, ports=ports, key=key, epoch=epoch, bus=url, sink=launcher.print_line
        )

        async def gather() -> Failure:
            return await gathering.run()

        return asyncio.run(launcher.run_plan(plan, listeners, gather))


def _worker(deployment: Deployment, settings: InstanceSettings, environ: Mapping[str, str], key: bytes) -> int:
    own = deployment.own
    check_worker(
        own,
        host=settings.host,
        port=settings.port,
        engines=settings.engines,
        devices=world.world_size(settings.parallel),
    )
    environ = {**environ, **_visible_devices(own.device_ids, settings.execution.device, environ)}
    role = own.role
    if not world.exchanges_kv(settings.parallel):
        # Engines without a role compute whole requests, so the deployment works and gives the same tokens.
        role = "both"
        launcher.print_line("antiphon", f"{own.name} computes requests whole, without its role: {world.NO_KV}")
    model = _prepared(replace(settings, role=role), environ)
    with contextlib.ExitStack() as stack:
        for each in own.device_ids:
            device = f"device {each} of {own.server.server_ip} is in use by another instance"
            stack.enter_context(_claimed(f"device-{own.server.server_ip}-{each}", device))
        (listener,) = listeners = sockets.listen(settings.host, settings.port, 1)
        stack.callback(sockets.close, listeners)
        worker = Worker(deployment, model, environ, key, stack.enter_context(run_directory()))
        return asyncio.run(worker.run(listener))


def _prepared(settings: InstanceSettings, environ: Mapping[str, str]) -> InstanceSettings:
    """Returns the settings with the model's files at a local path, after the checks that every server makes."""
    (model,) = models_of(settings)
    check(model)
    (located,) = launcher.located_models([model], environ)
    assert isinstance(located, InstanceSettings)
    return located


def _bus_url(local_url: str, deployment: Deployment) -> str:
    """Returns the bus's URL for the instances: the local one if all are on this host."""
    if deployment.has_one_host:
        return local_url
    host = deployment.own.server.server_ip
    return local_url.replace("127.0.0.1", f"[{host}]" if ":" in host else host)


def _visible_devices(ids: tuple[str, ...], device: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment variable that selects the engine's GPUs; empty on a CPU, where devices are slots."""
    if devices.on_cpu(device, environ):
        return {}
    found = devices.visible(environ)
    missing = [each for each in ids if each not in found]
    if missing:
        raise SettingsError(
            f"RANK_TABLE_FILE_PATH: device {', '.join(missing)} is not here: this process can use {', '.join(found)}. "
            "Make the tables with the numbers of GPUs of this machine"
        )
    return {devices.VARIABLE: ",".join(ids)}


@contextlib.contextmanager
def _claimed(name: str, in_use: str) -> Iterator[None]:
    """Context manager that claims a name on this machine. Raises SettingsError that says `in_use` if it is claimed.

    A claim is a socket with an abstract name, which the kernel removes when the process ends. All processes in the same
    network namespace see such names, including containers with `--net=host`. They exist on Linux only; elsewhere
    nothing is claimed.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as claim:
        if sys.platform == "linux":
            try:
                claim.bind(f"\0antiphon-{name}")
            except OSError as error:
                raise SettingsError(
                    f"RANK_TABLE_FILE_PATH: {in_use}: stop that one, or start this one with a local table of its own"
                ) from error
        yield


def _check_tools(path: str) -> None:
    missing = [name for name in TOOLS if path and not (Path(path) / "PD_separate" / name).is_file()]
    if missing:
        raise SettingsError(
            f"LLM_TOOLS_PATH: {path} has no PD_separate/{missing[0]}; set it to what `antiphon tools-path` prints, or "
            "unset it"
        )
