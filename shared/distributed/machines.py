"""The machines that compute one model together, and the index of this machine.

The same command runs on every machine. `--pod-ips` lists their addresses in the order of their numbers; the machine
with the first address is the head. Called by the launcher and the engine.
"""

import fcntl
import ipaddress
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

from antiphon.shared.flags import SettingsError
from antiphon.shared.settings.parallel import ParallelSettings

_SIOCGIFCONF, _ROOM = 0x8912, 64 * 1024
_IFREQ = struct.Struct("16s16s8x")
_IF_INET6 = Path("/proc/net/if_inet6")


@dataclass(frozen=True, slots=True)
class Machines:
    """All machines by their addresses, and the number of this one (0: the head)."""

    addresses: tuple[str, ...]
    own: int

    @property
    def is_head(self) -> bool:
        """Whether this machine has the scheduler and the server."""
        return self.own == 0

    @property
    def address(self) -> str:
        """This machine's address."""
        return self.addresses[self.own]

    def ranks(self, machine: int, world_size: int) -> range:
        """Returns the ranks of a machine. `world_size` must be a multiple of the number of machines."""
        each = world_size // len(self.addresses)
        return range(machine * each, (machine + 1) * each)


def addresses(pod_ips: str) -> tuple[str, ...]:
    """Returns the addresses of `--pod-ips`; empty if it is not given."""
    return tuple(word.strip() for word in pod_ips.split(",")) if pod_ips else ()


def find_machines(settings: ParallelSettings) -> Machines:
    """Returns the machines and this machine's index, from `--node-rank` or from its addresses. Raises SettingsError."""
    every = addresses(settings.pod_ips)
    if settings.node_rank is not None:
        if settings.node_rank >= len(every):
            raise SettingsError(
                f"--node-rank (NODE_RANK): {settings.node_rank} is not below the number of machines, {len(every)}"
            )
        return Machines(every, settings.node_rank)
    own = [place for place, address in enumerate(every) if is_own(address)]
    if len(own) != 1:
        how_many = "none" if not own else f"{len(own)}"
        raise SettingsError(
            f"--pod-ips: {how_many} of {settings.pod_ips} is an address of this machine, and it must be exactly one: "
            f"this machine has {', '.join(own_addresses())}. Correct the list, or say with NODE_RANK which one this "
            "machine is (0: the first)"
        )
    return Machines(every, own[0])


def is_own(address: str) -> bool:
    """Whether a numeric address belongs to this machine: a socket can be bound to it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.bind((address, 0))
    except OSError:
        return False
    return True


def own_addresses() -> list[str]:
    """Returns the addresses of this machine's network interfaces, loopback last."""
    found = list(dict.fromkeys(address for _, address in _interfaces()))
    return sorted(found, key=lambda address: ipaddress.ip_address(address).is_loopback)


def interface_of(address: str) -> str:
    """Returns the name of the network interface with an address of this machine. Raises OSError if there is none."""
    parsed = ipaddress.ip_address(address)
    for name, each in _interfaces():
        # Every address of 127.0.0.0/8 belongs to the loopback interface, which lists only one.
        if each == str(parsed) or (parsed.is_loopback and ipaddress.ip_address(each).is_loopback):
            return name
    raise OSError(f"no network interface of this machine has the address {address}")


def _interfaces() -> list[tuple[str, str]]:
    """Returns the name and the address of each network interface that has one."""
    room = bytearray(_ROOM)
    found: list[tuple[str, str]] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        found += _ipv4(sock, room)
    return found + _ipv6()


def _ipv4(sock: socket.socket, room: bytearray) -> list[tuple[str, str]]:
    import ctypes  # slow to import, and only needed if the model is on several machines

    buffer = (ctypes.c_char * _ROOM).from_buffer(room)
    answer = fcntl.ioctl(sock.fileno(), _SIOCGIFCONF, struct.pack("iL", _ROOM, ctypes.addressof(buffer)))
    (length,) = struct.unpack_from("i", answer)
    found: list[tuple[str, str]] = []
    for start in range(0, length, _IFREQ.size):
        name, address = _IFREQ.unpack_from(room, start)
        # An alias has the name of its interface and a colon.
        found.append((name.split(b"\0")[0].split(b":")[0].decode(), socket.inet_ntoa(address[4:8])))
    return found


def _ipv6() -> list[tuple[str, str]]:
    if not _IF_INET6.exists():
        return []
    rows = [line.split() for line in _IF_INET6.read_text().splitlines()]
    return [(row[5], str(ipaddress.ip_address(bytes.fromhex(row[0])))) for row in rows]
