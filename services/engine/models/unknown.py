"""What neither a family of this engine nor transformers knows, found without importing transformers.

Called by `backends.refusals` before any process starts, and by the loader of transformers' models.
"""

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from antiphon.services.engine.models.config_fields import config_error
from antiphon.services.engine.models.registry import supported_architectures
from antiphon.shared.errors import ServiceError

_LISTS = ("auto_mappings.py", "configuration_auto.py")
"""The files of transformers, in `models/auto`, that list the types of models."""


def check_known(config: Mapping[str, Any], *, trusted: bool) -> None:
    """Raises `ServiceError` if neither a family nor transformers knows the model of a config.json.

    `trusted`: `--trust-remote-code`, with which the model's directory may bring what transformers lacks. The files of
    transformers are searched for the type, because importing it takes seconds. A type that is not in them is unknown;
    a type that is there may still be refused when the model is loaded.
    """
    kind, names = config.get("model_type"), ", ".join(map(str, config.get("architectures") or [])) or "none at all"
    if trusted or not isinstance(kind, str) or not kind:
        return
    texts = _lists_of_transformers()
    if texts and not any(f'"{kind}"' in text for text in texts):
        if config.get("auto_map"):
            raise refusal(names, "its code comes with the model, and is run with --trust-remote-code only")
        raise refusal(names, f"it has no models of type {kind!r}")


def refusal(names: str, reason: str) -> ServiceError:
    """Returns the error for an architecture that neither this engine nor transformers runs."""
    return config_error(
        f"architecture {names} is not supported, nor does it run through transformers: {reason.rstrip('.')}. "
        f"Supported by themselves: {', '.join(supported_architectures())}."
    )


def _lists_of_transformers() -> list[str]:
    """Returns the contents of `_LISTS`; [] if they are not where they usually are."""
    found = importlib.util.find_spec("transformers")  # imports nothing: the package has no parent
    if found is None or not found.submodule_search_locations:
        return []
    paths = [Path(found.submodule_search_locations[0]) / "models" / "auto" / name for name in _LISTS]
    if not any(path.is_file() for path in paths):
        return []
    return [path.read_text(encoding="utf-8") for path in paths if path.is_file()]
