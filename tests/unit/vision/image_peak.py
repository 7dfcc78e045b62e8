"""A process that encodes an image with models without weights, and prints by how many bytes it grew for each.

Every array has pages of its own, which return to the system when it is freed: the growth is what is alive at the peak.
With the C library's usual settings the heap keeps pieces of freed arrays, and how many differs by a third from one run
to the next.

python -m tests.unit.vision.image_peak IMAGE DIRECTORY…
"""

import ctypes
import json
import multiprocessing
import sys
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoConfig

from antiphon.services.engine.worker.capacity.memory import peak_growth
from antiphon.services.vision.encoder import processor_arguments
from antiphon.services.vision.families import family_of
from antiphon.services.vision.images import open_image

_M_MMAP_THRESHOLD, _HEAP_BYTES_MAX = -3, 64 * 2**10
"""The parameter of mallopt(3), and the size from which an array is mapped. A set value is never adjusted."""


def _peak(directory: Path, file: bytes) -> int:
    config: Any = AutoConfig.from_pretrained(directory)
    made = family_of(config)(config, processor_arguments(directory, config, {}), torch.float32, directory)
    made.module.eval()
    with torch.inference_mode():
        # What the libraries allocate once.
        made.embed(Image.new("RGB", (64, 48)), "cpu")
        return peak_growth(lambda: made.embed(open_image(file), "cpu"))


if __name__ == "__main__":
    assert ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _HEAP_BYTES_MAX) == 1
    torch.set_num_threads(2)
    data = Path(sys.argv[1]).read_bytes()
    # A fresh process for each: what an earlier one left in the heap would be used again.
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        peaks = pool.starmap(_peak, [(Path(directory), data) for directory in sys.argv[2:]], chunksize=1)
    sys.stdout.write(json.dumps(peaks))
