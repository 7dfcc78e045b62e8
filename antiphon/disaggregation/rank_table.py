"""Rank tables: the files that name the scheduler, the prefill and the decode instances of a deployment.

The global table lists all instances and is the same for each of them. A local table has one instance. Every number in a
table is a JSON string. The format is that of tables for NPUs: `device_id` is a physical device of the host (a GPU's
number, on a CPU a slot), `device_ip` is the host's address, because devices here have no network of their own.
"""

import ipaddress
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from antiphon.shared.flags import SettingsError

Role = Literal["scheduler", "prefill", "decode"]
ROLES: tuple[Role, ...] = ("scheduler", "prefill", "decode")
"""The roles in the order of their groups: a role's index is its `group_id` in a global table."""
VERSION, STATUS = "1.0", "completed"
LOCAL_GROUP = "0"
"""`group_id` of every local table. It is unrelated to the role."""
_HOST_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?")
_NUMBER = re.compile(r"0|[1-9][0-9]*")


class Device(msgspec.Struct, frozen=True):
    """A device of an instance. `rank_id` counts the devices of the instance from 0."""

    device_id: str
    device_ip: str
    rank_id: str


class Server(msgspec.Struct, frozen=True, omit_defaults=True):
    """An instance: its host's name and address, and its devices. The scheduler has no field `device`."""

    server_id: str
    server_ip: str
    device: tuple[Device, ...] | None = None


class Group(msgspec.Struct, frozen=True):
    """The instances of one role."""

    group_id: str
    server_count: str
    server_list: tuple[Server, ...]


class GlobalTable(msgspec.Struct, frozen=True):
    """The global table: one group for each role, in the order of `ROLES`."""

    version: str
    status: str
    server_group_list: tuple[Group, ...]

    def servers(self, role: Role) -> tuple[Server, ...]:
        """Returns the instances of a role in their order."""
        return self.server_group_list[ROLES.index(role)].server_list


class LocalTable(msgspec.Struct, frozen=True, kw_only=True):
    """The table of one instance."""

    version: str
    status: str
    group_id: str
    server_count: str
    server_list: tuple[Server, ...]


T = TypeVar("T", GlobalTable, LocalTable)


def global_table(servers: dict[Role, Sequence[Server]]) -> GlobalTable:
    """Returns the global table with these instances. Roles that are not named have none."""
    listed = [tuple(servers.get(role, ())) for role in ROLES]
    groups = tuple(Group(str(index), str(len(each)), each) for index, each in enumerate(listed))
    return GlobalTable(VERSION, STATUS, groups)


def local_table(server: Server) -> LocalTable:
    """Returns the local table of an instance."""
    return LocalTable(version=VERSION, status=STATUS, group_id=LOCAL_GROUP, server_count="1", server_list=(server,))


def encode(table: GlobalTable | LocalTable) -> bytes:
    """Returns the text of a table's file: indented JSON."""
    return msgspec.json.format(msgspec.json.encode(table), indent=2) + b"\n"


def read_global(path: Path, *, complete: bool = True) -> GlobalTable:
    """Reads and checks a global table. Raises SettingsError that names the file and the mistake.

    `complete`: the table must have exactly one scheduler and at least one instance of each other role.
    """
    table = _read(path, GlobalTable)
    problem = next(problems(table, complete=complete), "")
    if problem:
        raise SettingsError(f"global rank table {path}: {problem}")
    return table


def read_local(path: Path) -> LocalTable:
    """Reads and checks a local table. Raises SettingsError that names the file and the mistake."""
    table = _read(path, LocalTable)
    problem = next(_local_problems(table), "")
    if problem:
        raise SettingsError(f"local rank table {path}: {problem}")
    return table


def problems(table: GlobalTable, *, complete: bool) -> Iterator[str]:
    """Yields the mistakes in a global table, as sentences. `complete`: see `read_global`."""
    yield from _head_problems(table)
    ids = [group.group_id for group in table.server_group_list]
    if ids != [str(index) for index in range(len(ROLES))]:
        yield (
            f"server_group_list has the groups {', '.join(ids) or '(none)'}; it must have exactly 3: '0' (scheduler), "
            "'1' (prefill), '2' (decode), in this order"
        )
        return
    for role, group in zip(ROLES, table.server_group_list, strict=True):
        yield from _count_problems(f"group {group.group_id} ({role})", group.server_count, group.server_list)
        for server in group.server_list:
            yield from _server_problems(f"{role} instance on {server.server_ip}", server, devices=role != "scheduler")
    yield from _shared_devices(table)
    if complete:
        yield from _missing_instances(table)


def names_of(servers: Sequence[Server]) -> list[str]:
    """Returns, for each instance of a host, its device ids in the form used in the name of its local table.

    Ids of one digit are joined directly (`45`), others by `-` (`10-11`). If two instances would have the same name
    (one with the devices 1 and 2, one with the device 12), the one with several devices uses `-`.
    """
    ids = [[device.device_id for device in server.device or ()] for server in servers]
    plain = ["".join(each) if all(len(one) == 1 for one in each) else "-".join(each) for each in ids]
    return ["-".join(each) if plain.count(name) > 1 else name for each, name in zip(ids, plain, strict=True)]


def is_device_id(text: str) -> bool:
    """Whether a text is a device's number: decimal, at least 0, without leading zeros."""
    return _NUMBER.fullmatch(text) is not None


def is_address(text: str) -> bool:
    """Whether a text is an IP address or a host name."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return _HOST_NAME.fullmatch(text) is not None
    return True


def _read(path: Path, kind: type[T]) -> T:
    which = "global" if kind is GlobalTable else "local"
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise SettingsError(f"{which} rank table {path} cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        # ValidationError, a DecodeError, names the field and says that numbers must be strings.
        raise SettingsError(
            f"{which} rank table {path}: {error}. Make it with `antiphon ranktable`; numbers are strings in it"
        ) from error


def _local_problems(table: LocalTable) -> Iterator[str]:
    yield from _head_problems(table)
    if table.group_id != LOCAL_GROUP:
        yield f"group_id is {table.group_id!r}; in a local table it is {LOCAL_GROUP!r}"
    if len(table.server_list) != 1:
        yield f"server_list has {len(table.server_list)} instances; a local table has exactly 1"
        return
    yield from _count_problems("the table", table.server_count, table.server_list)
    server = table.server_list[0]
    yield from _server_problems(f"instance on {server.server_ip}", server, devices=server.device is not None)


def _head_problems(table: GlobalTable | LocalTable) -> Iterator[str]:
    if table.version != VERSION:
        yield f"version is {table.version!r}, not {VERSION!r}"
    if table.status != STATUS:
        yield f"status is {table.status!r}, not {STATUS!r}: wait until the table is finished, or make it again"


def _count_problems(where: str, count: str, servers: Sequence[Server]) -> Iterator[str]:
    if count != str(len(servers)):
        yield f"{where}: server_count is {count!r}, and server_list has {len(servers)}"


def _server_problems(where: str, server: Server, *, devices: bool) -> Iterator[str]:
    if not server.server_id:
        yield f"{where}: server_id is empty"
    if not is_address(server.server_ip):
        yield f"{where}: server_ip {server.server_ip!r} is neither an IP address nor a host name"
    if not devices:
        if server.device is not None:
            yield f"{where}: a scheduler has no field 'device'"
        return
    if not server.device:
        yield f"{where}: it needs at least one device"
    for rank, device in enumerate(server.device or ()):
        if not is_device_id(device.device_id):
            yield f"{where}: device_id {device.device_id!r} is not a number from 0 on"
        if not is_address(device.device_ip):
            yield f"{where}: device_ip {device.device_ip!r} is neither an IP address nor a host name"
        if device.rank_id != str(rank):
            yield f"{where}: rank_id {device.rank_id!r} stands where '{rank}' must: ranks count from 0 in each instance"


def _shared_devices(table: GlobalTable) -> Iterator[str]:
    """Yields each device that is listed more than once. Devices are compared within a host."""
    servers = [*table.servers("prefill"), *table.servers("decode")]
    used = Counter((server.server_ip, device.device_id) for server in servers for device in server.device or ())
    for (host, device), count in used.items():
        if count > 1:
            yield f"device {device} of {host} is listed {count} times: a device belongs to one instance"


def _missing_instances(table: GlobalTable) -> Iterator[str]:
    schedulers = len(table.servers("scheduler"))
    if schedulers != 1:
        yield (
            f"{schedulers} schedulers are listed; a deployment has exactly 1: make the table of exactly one machine "
            "with --api-server"
        )
    for role in ("prefill", "decode"):
        if not table.servers(role):
            yield f"no {role} instance is listed; at least one is needed (--{role}-server-list)"
