"""An engine in which one bit of one weight flips when the process gets SIGUSR1, run as a process by tests.

FLIP_BIT: number of the bit in its 16-bit weight (14: the exponent's highest, 0: the lowest). FLIP_WEIGHT: the matrix,
by its name in `WeightMemory`. The model and everything else are the product's; the weights must not be mapped from a
file (`--weight-cache=off`).
"""

import ctypes
import os
import signal
import sys

from antiphon.services.engine.service import EngineService
from antiphon.shared.actors.service import main
from antiphon.shared.config import EngineSettings

WEIGHT, BIT = os.environ.get("FLIP_WEIGHT", "layer 0, down"), int(os.environ.get("FLIP_BIT", "14"))


class FlippingEngineService(EngineService):
    """An engine whose memory goes bad."""

    def flip(self) -> None:
        """Flips the bit in the middle of the matrix."""
        memory = next(one for one in self.engine._executor.weight_memory() if one.name == WEIGHT)
        address = memory.address + memory.num_bytes // 2 // 64 * 64 + BIT // 8
        cell = ctypes.c_uint8.from_address(address)
        cell.value ^= 1 << BIT % 8


def build(settings: EngineSettings) -> EngineService:
    service = FlippingEngineService(settings)
    signal.signal(signal.SIGUSR1, lambda *_: service.flip())
    return service


if __name__ == "__main__":
    sys.exit(main("engine", EngineSettings, build, heartbeat_thread=True))
