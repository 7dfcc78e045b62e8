"""Which user has a socket of this machine, as the kernel's tables of TCP sockets say. Linux only.

User namespaces: the kernel shows users who are unknown in this process's namespace as its overflow user (65534,
nobody). So somebody who runs as nobody in a namespace of its own cannot be told from them.
"""

import pwd
import socket
import sys
from pathlib import Path

Address = tuple[str, int]
"""IPv4 address and port."""
_TABLES = (Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6"))
_MAPPED = "0" * 16 + f"{int.from_bytes(bytes([0, 0, 255, 255]), sys.byteorder):08X}"
"""What precedes an IPv4 address in the table of IPv6, where the sockets of a server for both are."""
_USER, _INODE = 6, 8
"""Places of these fields in a row, counted from the local address."""


def user_of_end(local: Address, remote: Address) -> int | None:
    """Returns the user id of the process that has the end `local` of a connection; None if no process has it.

    A connection that waits for being accepted has no user yet.
    """
    for prefix in ("", _MAPPED):
        for row in _rows(f"{prefix}{_written(local)} {prefix}{_written(remote)} "):
            return int(row[_USER]) if row[_INODE] != "0" else None
    return None


def listener(port: int) -> str:
    """Returns the name of the user who listens at a port; empty if it is not known."""
    for zeros in ("0" * 8, "0" * 32):
        for row in _rows(f":{port:04X} {zeros}:0000 0A "):
            return user_name(int(row[_USER]))
    return ""


def user_name(uid: int) -> str:
    """Returns the name of a user, or the number if it has none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _rows(part: str) -> list[list[str]]:
    """Returns the fields, from the local address on, of the rows that contain `part`."""
    found: list[list[str]] = []
    for path in _TABLES:
        try:
            table = path.read_text(encoding="ascii")
        except OSError:
            continue
        found += [line.partition(":")[2].split() for line in table.splitlines() if part in line]
    return found


def _written(address: Address) -> str:
    return f"{int.from_bytes(socket.inet_aton(address[0]), sys.byteorder):08X}:{address[1]:04X}"
