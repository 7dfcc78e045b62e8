"""Lists the memory of a loaded model's weights in the host's memory, for `canary.checksums`."""

import torch

from antiphon.services.engine.backends.torch.adapters import AdapterStep
from antiphon.services.engine.worker.interface import WeightMemory
from antiphon.services.engine.worker.loading.tensors import tensors_of


def host_weights(root: object) -> list[WeightMemory]:
    """Returns the memory of all tensors in the host's memory that an object's fields refer to, each once.

    `root` is an object with weights, such as `DecoderWeights`, or a torch module. Tensors on a device and tensors in a
    library's own layout are left out.
    """
    found: dict[int, WeightMemory] = {}
    # The adapters' tables change whenever an adapter gets a slot.
    for name, tensor in tensors_of(root, (AdapterStep,)):
        plain = tensor.device.type == "cpu" and tensor.layout is torch.strided and tensor.numel()
        if plain and tensor.is_contiguous():
            found.setdefault(tensor.data_ptr(), WeightMemory(name, tensor.data_ptr(), tensor.nbytes))
    return list(found.values())
