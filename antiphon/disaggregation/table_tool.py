"""`antiphon ranktable`: creates the rank tables of this machine, and merges the global tables of several machines.

With one machine, `--mode gen` is enough. With several machines, run it on each, merge all global tables with `--mode
merge` on one, and start every instance with the merged table and its own local table.
"""

import argparse
import os
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path

from antiphon.disaggregation.rank_table import (
    ROLES,
    Device,
    GlobalTable,
    LocalTable,
    Role,
    Server,
    encode,
    global_table,
    is_address,
    is_device_id,
    local_table,
    names_of,
    problems,
    read_global,
)
from antiphon.shared.flags import SettingsError
from antiphon.terminal.output import show, tell

MERGED = "global_ranktable_merge.json"
_PROBE = ("192.0.2.1", 9)
"""An address of a documentation network. Nothing is sent to it; the kernel only looks up the route."""
_NOTE = (
    "device_ip is this host's address in these tables: devices here have no network of their own, and hccn_tool is not "
    "needed"
)


def run(options: argparse.Namespace) -> int:
    """Writes the tables and prints their names. Returns 0. Raises SettingsError for invalid tables.

    `options` has `mode` and the flags of `antiphon ranktable`.
    """
    if problem := misplaced(options):
        raise SettingsError(problem)
    if options.mode == "merge":
        written = merge(options.global_ranktable_list, options.save_dir)
    else:
        lists = (options.prefill_server_list or (), options.decode_server_list or ())
        written = generate(*lists, options.save_dir, ip=options.ip or own_address(), api_server=options.api_server)
        tell(_NOTE)
    show({"files": list(map(str, written))}, map(str, written), as_json=options.json)
    return 0


def misplaced(options: argparse.Namespace) -> str:
    """Returns an error message if flags are missing or do not belong to the mode, else ''."""
    lists = {"--prefill-server-list": options.prefill_server_list, "--decode-server-list": options.decode_server_list}
    of_gen = {**lists, "--api-server": options.api_server, "--ip": options.ip}
    if options.mode == "gen":
        if options.global_ranktable_list:
            return "--global-ranktable-list is for --mode merge"
        if not (options.api_server or any(lists.values())):
            return "--mode gen needs at least one of --api-server, --prefill-server-list and --decode-server-list"
        return ""
    if given := [name for name, value in of_gen.items() if value]:
        return f"{given[0]} is for --mode gen"
    return "" if options.global_ranktable_list else "--mode merge needs --global-ranktable-list"


def generate(
    prefill: Sequence[str], decode: Sequence[str], directory: Path, *, ip: str, api_server: bool
) -> list[Path]:
    """Writes the tables of the instances of this machine and returns their paths, the global table first.

    `prefill` and `decode` have the device ids of each instance, separated by commas (`4,5`). `ip` is the address under
    which the other instances reach this machine. Raises SettingsError.
    """
    if not is_address(ip):
        raise SettingsError(f"--ip: {ip!r} is neither an IP address nor a host name")
    host = socket.gethostname()
    servers: dict[Role, Sequence[Server]] = {
        "scheduler": [Server(host, ip)] if api_server else [],
        "prefill": [_server(host, ip, word, "--prefill-server-list") for word in prefill],
        "decode": [_server(host, ip, word, "--decode-server-list") for word in decode],
    }
    table = global_table(servers)
    problem = next(problems(table, complete=False), "")
    if problem:
        raise SettingsError(f"--prefill-server-list, --decode-server-list: {problem}")
    tables: dict[str, GlobalTable | LocalTable] = {f"global_ranktable_{ip}.json": table}
    workers = (*servers["prefill"], *servers["decode"])
    for server, name in zip(workers, names_of(workers), strict=True):
        tables[f"local_ranktable_{ip}_{name}.json"] = local_table(server)
    if api_server:
        tables[f"local_ranktable_{ip}_host.json"] = local_table(servers["scheduler"][0])
    return [_write(directory, name, each) for name, each in tables.items()]


def merge(paths: Sequence[Path], directory: Path) -> list[Path]:
    """Merges global tables in the given order and writes the result. Returns its path in a list. Raises SettingsError.

    The result must be complete: one scheduler and at least one instance of each other role.
    """
    parts = [read_global(path, complete=False) for path in paths]
    servers: dict[Role, Sequence[Server]] = {
        role: [server for part in parts for server in part.servers(role)] for role in ROLES
    }
    table = global_table(servers)
    problem = next(problems(table, complete=True), "")
    if problem:
        raise SettingsError(f"--global-ranktable-list: together, {problem}")
    return [_write(directory, MERGED, table)]


def own_address() -> str:
    """Returns the address from which this machine reaches other networks, or 127.0.0.1 without a network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(_PROBE)
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def _server(host: str, ip: str, word: str, flag: str) -> Server:
    ids = word.split(",")
    for each in ids:
        if not is_device_id(each):
            raise SettingsError(
                f"{flag}: {word!r} is not a list of device ids: numbers from 0 on, joined by commas (4,5); instances "
                "are separated by spaces (0,1 2,3)"
            )
    return Server(host, ip, tuple(Device(each, ip, str(rank)) for rank, each in enumerate(ids)))


def _write(directory: Path, name: str, table: GlobalTable | LocalTable) -> Path:
    """Writes a table's file atomically."""
    path = directory / name
    try:
        directory.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(prefix=f".{name}.", dir=directory)
        with os.fdopen(descriptor, "wb") as file:
            file.write(encode(table))
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except OSError as error:
        raise SettingsError(f"--save-dir: {path} cannot be written: {error.strerror}") from error
    return path
