"""Runs a model's own vision encoder: the processor and the module of transformers, with the checkpoint's weights.

    image → processor → patches [n, patch width] → encoder → embeddings [tokens, hidden of the decoder]

`families` has the code specific to model families. The decoder's weights are not read. Called from a thread of the
service, and by the offline API.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig

from antiphon.services.vision.families import family_of
from antiphon.services.vision.families.family import ImageFamily
from antiphon.services.vision.images import open_image
from antiphon.shared.codec import TOKEN_BYTES, pack_ids
from antiphon.shared.flags import SettingsError
from antiphon.shared.models.image_models import processor_fields
from antiphon.shared.observability import resources

_TYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedImage:
    """The embeddings of an image: [rows * columns, hidden] numbers of the type `dtype`, row by row."""

    rows: int
    columns: int
    embeddings: bytes
    dtype: str
    layout: bytes = b""
    """See `ImageTokens.layout`."""
    num_pixels: int = 0
    """Pixels of the image, before the model's processor has scaled it."""

    @property
    def num_tokens(self) -> int:
        """Number of the image's tokens in a prompt."""
        return len(self.layout) // TOKEN_BYTES or self.rows * self.columns


class VisionEncoder:
    """The vision encoder of one model, on one device."""

    def __init__(self, directory: Path, processor_kwargs: Mapping[str, Any], dtype: torch.dtype, device: str) -> None:
        """Loads processor and weights.

        Raises SettingsError for a model without a vision encoder, or for wrong arguments.
        """
        config = AutoConfig.from_pretrained(directory)
        kind, fields = family_of(config), processor_arguments(directory, config, processor_kwargs)
        self._family = kind(config, fields, dtype, directory)
        self._load(directory, dtype)
        self._family.module.eval().to(device)
        self._device = device
        self.token_id = self._family.token_id
        """The image token, which marks an image's place in a prompt."""
        self.place, self.text = self._family.place, self._family.text
        """See `ImageFamily`."""
        told = json.dumps([config.vision_config.to_dict(), fields, str(dtype), device], sort_keys=True, default=str)
        self.fingerprint = hashlib.sha256(told.encode()).digest()
        """Digest of everything that affects an image's embeddings besides weights and file."""
        try:
            self.encode(Image.new("RGB", (64, 48)))
        except Exception as error:  # wrong arguments may lead to any exception
            raise wrong_arguments(error) from error

    def encode_file(self, file: bytes) -> EncodedImage:
        """Returns the embeddings of the image in a file. Raises ServiceError for an invalid file."""
        return self.encode(open_image(file))

    @torch.inference_mode()
    def encode(self, image: Image.Image) -> EncodedImage:
        """Returns the embeddings of an image."""
        rows, columns, output, layout = self._family.embed(image, self._device)
        assert len(output) == rows * columns, (output.shape, rows, columns)
        assert not layout or layout.count(self.token_id) == len(output), (output.shape, layout)
        numbers = output.to("cpu").contiguous()
        data = numbers.view(torch.uint8).numpy().tobytes()
        pixels = image.width * image.height
        return EncodedImage(
            rows=rows,
            columns=columns,
            embeddings=data,
            dtype=_TYPES[numbers.dtype],
            layout=pack_ids(layout),
            num_pixels=pixels,
        )

    def _load(self, directory: Path, dtype: torch.dtype) -> None:
        module, tensors = self._family.module, dict[str, Tensor]()
        wanted = module.state_dict().keys()
        for path in sorted(directory.glob("*.safetensors")):
            try:
                with safe_open(path, framework="pt") as file:
                    for name in file.keys():  # noqa: SIM118 - not a mapping
                        ours = self._family.parameter(name)
                        if ours is not None and ours in wanted:
                            tensors[ours] = file.get_tensor(name).to(dtype)
            except (SafetensorError, OSError) as error:
                raise SettingsError(f"--model: {path} cannot be read as safetensors: {error}") from error
        missing = sorted(wanted - tensors.keys())
        if missing:
            raise SettingsError(f"--enable-mm: the checkpoint lacks weights of its vision encoder: {missing[0]}, …")
        module.load_state_dict(tensors)


def load_encoder(directory: Path, processor_kwargs: Mapping[str, Any], device: str) -> VisionEncoder:
    """Returns the encoder of an image service: on a GPU in the checkpoint's type, on a CPU in float32.

    On a CPU it uses half of the cores, so that engines on the same machine keep running. Raises SettingsError.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise SettingsError("--vision-device=cuda: PyTorch finds no CUDA device; leave the option out")
    if device == "cuda":
        resources.add_gpu(torch.cuda, torch.cuda.current_device())
    if device == "cpu":
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // 2))
    dtype = encoder_dtype(AutoConfig.from_pretrained(directory), device)
    return VisionEncoder(directory, processor_kwargs, dtype, device)


def encoder_dtype(config: Any, device: str) -> torch.dtype:
    """Returns the data type of encoding: float32 on a CPU, the checkpoint's type on a GPU."""
    return config.dtype if device != "cpu" and config.dtype in _TYPES else torch.float32


def processor_arguments(directory: Path, config: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a model's image processor, with those of `--mm-processor-kwargs`.

    Raises SettingsError for one that the processor does not have, or that the encoder's weights determine.
    """
    kind, own = family_of(config), processor_fields(directory)
    return {**own, **kind.DEFAULTS, **_checked(kwargs, kind, kind.processor(config, own))}


def wrong_arguments(error: Exception) -> SettingsError:
    """Returns the error for arguments of the image processor with which it fails."""
    return SettingsError(f"--mm-processor-kwargs: no image can be processed with them: {error}")


def _checked(kwargs: Mapping[str, Any], kind: type[ImageFamily], processor: Any) -> dict[str, Any]:
    known = {*processor.valid_kwargs.__annotations__, "size", "resample", "do_resize", "do_rescale"}
    known |= {"do_normalize", "image_mean", "image_std", "rescale_factor"}
    for name in kwargs:
        if name in kind.FIXED:
            raise SettingsError(f"--mm-processor-kwargs: '{name}' follows from the model's weights: leave it out")
        if name not in known:
            raise SettingsError(
                f"--mm-processor-kwargs: the processor has no argument '{name}'; it has {', '.join(sorted(known))}"
            )
    return dict(kwargs)
