"""The quantization methods of checkpoints: the tensors of a file that make up a weight, and their meaning.

Each module has one format, made from the `quantization_config` of a config.json. Where a weight has a form that no
backend multiplies (groups of fewer than 16 inputs), the plain weight is returned instead: the results are the same, the
memory is that of plain weights. Called by `quantization/choice.py`.
"""

from collections.abc import Callable, Mapping
from typing import Any

from antiphon.services.engine.quantization.formats.awq import Awq
from antiphon.services.engine.quantization.formats.bitsandbytes import BitsAndBytes
from antiphon.services.engine.quantization.formats.compressed_tensors import CompressedTensors, smoothquant
from antiphon.services.engine.quantization.formats.fp8 import Fp8
from antiphon.services.engine.quantization.formats.gptq import Gptq
from antiphon.services.engine.quantization.formats.mxfp4 import Mxfp4
from antiphon.services.engine.quantization.method import PreparedMethod
from antiphon.shared.flags import SettingsError
from antiphon.shared.settings.quantization import Method, quantization_settings


def _gguf(settings: Mapping[str, Any]) -> PreparedMethod:
    # Imported here because the package `gguf` is slow to import and few models need it.
    from antiphon.services.engine.quantization.formats.gguf import Gguf

    return Gguf.of_config(settings)


_METHODS: dict[Method, Callable[[Mapping[str, Any]], PreparedMethod]] = {
    "awq": Awq.of_config,
    "gptq": Gptq.of_config,
    "bitsandbytes": BitsAndBytes.of_config,
    "compressed-tensors": CompressedTensors.of_config,
    "fp8": Fp8.of_config,
    "gguf": _gguf,
    "mxfp4": Mxfp4.of_config,
    "smoothquant": lambda _: smoothquant(),
}


def prepared(method: Method, config: Mapping[str, Any]) -> PreparedMethod:
    """Returns the method with the parameters of a model's config. Raises SettingsError for what is not supported."""
    try:
        return _METHODS[method](quantization_settings(config))
    except (KeyError, TypeError, ValueError) as error:
        raise SettingsError(
            f"--model: quantization_config of config.json ({method}) is not supported: {error}"
        ) from error
