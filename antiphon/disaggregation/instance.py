"""This process's entry in the rank tables: its role, and the checks of its settings against the tables.

A process has two tables: the global one, and the local one of its instance. The instance's role is that of the group of
the global table that contains the local table's entry. All mistakes raise SettingsError before anything starts.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from antiphon.disaggregation.rank_table import ROLES, GlobalTable, Role, Server, encode, read_global, read_local
from antiphon.shared.flags import SettingsError

GLOBAL_VARIABLE, LOCAL_VARIABLE = "GLOBAL_RANK_TABLE_FILE_PATH", "RANK_TABLE_FILE_PATH"
_WILDCARDS = ("0.0.0.0", "::", "")
_LOCAL_NAMES = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True, slots=True)
class Instance:
    """One instance: its role, its place in the group of this role (from 0), and its entry in the tables."""

    role: Role
    index: int
    server: Server

    @property
    def name(self) -> str:
        """The instance's name on the bus and in messages, such as `prefill-1`."""
        return self.role if self.role == "scheduler" else f"{self.role}-{self.index + 1}"

    @property
    def device_ids(self) -> tuple[str, ...]:
        """The physical numbers of the devices, in the order of their ranks."""
        return tuple(device.device_id for device in self.server.device or ())


@dataclass(frozen=True, slots=True)
class Deployment:
    """The instances of the global table, one of which is this process."""

    table: GlobalTable
    own: Instance

    @property
    def digest(self) -> str:
        """Identifies the global table's content; equal for all instances of a deployment."""
        return hashlib.sha256(encode(self.table)).hexdigest()

    def workers(self) -> list[Instance]:
        """Returns the prefill instances, followed by the decode instances, in the order of the table."""
        return [
            Instance(role, index, server) for role in ROLES[1:] for index, server in enumerate(self.table.servers(role))
        ]

    def on_host(self, host: str) -> int:
        """Returns the number of prefill and decode instances of a host."""
        return sum(worker.server.server_ip == host for worker in self.workers())

    @property
    def has_one_host(self) -> bool:
        """Whether all instances, the scheduler included, are on the same host."""
        servers = [server for role in ROLES for server in self.table.servers(role)]
        return len({server.server_ip for server in servers}) == 1


def read_deployment(global_path: str, local_path: str) -> Deployment:
    """Reads both tables and finds this process's instance. Raises SettingsError."""
    for variable, path in ((GLOBAL_VARIABLE, global_path), (LOCAL_VARIABLE, local_path)):
        if not path:
            raise SettingsError(
                f"{variable} is not set: export the path of the {'global' if variable == GLOBAL_VARIABLE else 'local'} "
                "rank table, which `antiphon ranktable` makes"
            )
    table, local = read_global(Path(global_path)), read_local(Path(local_path)).server_list[0]
    for role in ROLES:
        for index, server in enumerate(table.servers(role)):
            if server == local:
                return Deployment(table, Instance(role, index, server))
    raise SettingsError(_not_listed(table, local, global_path, local_path))


def check_worker(own: Instance, *, host: str, port: int, engines: int, devices: int) -> None:
    """Raises SettingsError if settings of a prefill or decode instance contradict the tables.

    `devices` is the number of devices that the engine computes on (`parallel.world_size`).
    """
    if devices != len(own.device_ids):
        raise SettingsError(
            f"--tensor-parallel-size (times --pipeline-parallel-size): {devices} is not the number of devices of this "
            f"instance, which the rank table gives as {len(own.device_ids)} ({','.join(own.device_ids)})"
        )
    if engines != 1:
        raise SettingsError(
            f"--engines (--worker-num): {engines}; an instance has one engine. Give further engines tables of their own"
        )
    if port == 0:
        raise SettingsError("--port: 0 is not possible: the scheduler reaches this instance by its port (NODE_PORTS)")
    if not _reachable(host, own.server.server_ip):
        raise SettingsError(
            f"--host: at {host} the scheduler does not reach this instance, whose server_ip is "
            f"{own.server.server_ip}; use --host=0.0.0.0"
        )


def check_lengths(batched: int | None, model_len: int | None) -> None:
    """Raises SettingsError if a step can have fewer tokens than the longest context. None: not set."""
    if batched is not None and model_len is not None and batched < model_len:
        raise SettingsError(
            f"--max-num-batched-tokens: {batched} is less than --max-model-len {model_len}; 4096 or 8192 is recommended"
        )


def check_ports(deployment: Deployment, node_ports: str, port: int) -> list[int]:
    """Returns the ports of NODE_PORTS, one for each of `Deployment.workers`. Raises SettingsError.

    `port` is the scheduler's own.
    """
    workers, scheduler = deployment.workers(), deployment.own.server
    wanted = ", ".join(worker.name for worker in workers)
    if not node_ports.strip():
        raise SettingsError(f"NODE_PORTS is not set: export the --port of each instance, by commas, for {wanted}")
    ports = [_port(word.strip()) for word in node_ports.split(",")]
    if len(ports) != len(workers):
        raise SettingsError(
            f"NODE_PORTS: {node_ports} has {len(ports)} ports, and the global rank table {len(workers)} instances; "
            f"give one for each of {wanted}, in this order"
        )
    _check_distinct(workers, ports)
    for worker, each in zip(workers, ports, strict=True):
        if each == port and worker.server.server_ip == scheduler.server_ip:
            raise SettingsError(f"--port: {port} is the port of {worker.name} on the same host; choose another one")
    return ports


def _check_distinct(workers: Sequence[Instance], ports: Sequence[int]) -> None:
    for later, (worker, port) in enumerate(zip(workers, ports, strict=True)):
        for other, same in zip(workers[:later], ports[:later], strict=True):
            if port != same:
                continue
            if worker.role != other.role:
                raise SettingsError(
                    f"NODE_PORTS: {other.name} and {worker.name} have the same port {port}; prefill and decode "
                    "instances may not share a port"
                )
            if worker.server.server_ip == other.server.server_ip:
                raise SettingsError(
                    f"NODE_PORTS: {other.name} and {worker.name} on {worker.server.server_ip} have the same port "
                    f"{port}; instances of a host need different ports"
                )


def _port(word: str) -> int:
    if not word.isdecimal() or not 1 <= int(word) <= 65535:
        raise SettingsError(f"NODE_PORTS: {word!r} is not a port between 1 and 65535; give them as 8088,8089")
    return int(word)


def _reachable(host: str, server_ip: str) -> bool:
    """Whether an instance that listens at `host` can be reached at `server_ip`, judged by the names only."""
    return host in _WILDCARDS or host == server_ip or (host in _LOCAL_NAMES and server_ip in _LOCAL_NAMES)


def _not_listed(table: GlobalTable, local: Server, global_path: str, local_path: str) -> str:
    """Returns the message for a local table whose instance is not in the global table with the same values."""
    what = f"{LOCAL_VARIABLE}: {local_path}"
    ids = {device.device_id for device in local.device or ()}
    for role in ROLES:
        for server in table.servers(role):
            shared = ids & {device.device_id for device in server.device or ()}
            if server.server_ip == local.server_ip and (shared or (role == "scheduler" and not ids)):
                return (
                    f"{what} differs from its entry in the global rank table {global_path} ({role} instance on "
                    f"{server.server_ip}); make both with one call of `antiphon ranktable`"
                )
    if not ids:
        return f"{what} is a scheduler's (no devices); the global rank table {global_path} lists another one"
    return (
        f"{what}: the instance on {local.server_ip} with the devices {', '.join(sorted(ids))} is in no group of the "
        f"global rank table {global_path}; with several machines, join the global tables first (--mode merge)"
    )
