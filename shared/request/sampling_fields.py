"""Builds `SamplingParams` from the fields of a request, by name. Pure.

Request bodies and the offline `SamplingParams` have a field for each field of the engine's `SamplingParams`, with the
same name. CONTRIBUTING.md says where a new parameter is added.
"""

from typing import Any

import msgspec

from shared.parameters.sampling import SamplingParams

_DEFAULTS: dict[str, Any] = {field.name: field.default for field in msgspec.structs.fields(SamplingParams)}


def sampling_params(fields: object, **resolved: Any) -> SamplingParams:
    """Returns the sampling parameters of a request, unchecked (see `shared.parameters.sampling.check`).

    Each parameter is the attribute of `fields` with its name; None, or no such attribute, means the default. `resolved`
    has the values of parameters that depend on more than the field, such as `max_tokens` and `seed`.
    """
    for name, default in _DEFAULTS.items():
        if name not in resolved and (given := getattr(fields, name, None)) is not None:
            resolved[name] = _value(given, default)
    return SamplingParams(**resolved)


def _value(given: Any, default: Any) -> Any:
    if isinstance(default, float):
        return float(given)  # 1 is a valid temperature
    return tuple(given) if isinstance(default, tuple) else given
