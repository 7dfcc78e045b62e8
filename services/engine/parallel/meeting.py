"""The meeting point of an engine's ranks for torch.distributed, and the data of one rank. No torch."""

import msgspec


class Meeting(msgspec.Struct, frozen=True, kw_only=True):
    """How a rank finds the other ranks.

    Ranks of one machine meet over a file, `path`. Ranks of several machines meet at `host`:`port`, where the first rank
    listens.
    """

    path: str = ""
    host: str = ""
    port: int = 0
    listener: int = -1
    """File descriptor of the first rank's listening socket; -1 for other ranks."""
    address: str = ""
    """Address of this rank's machine for the other ranks. Empty: the loopback device."""
    local_rank: int = 0
    """Number of this rank on its machine, which is the number of its device."""
    local_size: int = 1
    """Number of ranks of this machine, which share its memory."""
