"""A process that encodes a picture with models without weights, and prints by how many bytes it grew for each.

python -m tests.unit.vision.picture_peak PICTURE DIRECTORY…
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoConfig

from services.engine.worker.capacity.memory import peak_growth
from services.vision.encoder import processor_arguments
from services.vision.families import family_of
from services.vision.pictures import open_picture


def _peak(directory: Path, file: bytes) -> int:
    config: Any = AutoConfig.from_pretrained(directory)
    made = family_of(config)(config, processor_arguments(directory, config, {}), torch.float32, directory)
    made.module.eval()
    with torch.inference_mode():
        # What the libraries allocate once.
        made.embed(Image.new("RGB", (64, 48)), "cpu")
        return peak_growth(lambda: made.embed(open_picture(file), "cpu"))


if __name__ == "__main__":
    torch.set_num_threads(2)
    data = Path(sys.argv[1]).read_bytes()
    sys.stdout.write(json.dumps([_peak(Path(directory), data) for directory in sys.argv[2:]]))
