"""Adapters of the offline API: `LoRARequest`, `PromptAdapterRequest`, and loading the adapters of a call."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from antiphon.offline.prompts.inputs import paired
from antiphon.services.engine.adapters.delta import LoadedAdapter
from antiphon.services.engine.adapters.library import AdapterLibrary
from antiphon.services.engine.core.request import SequenceSpec, with_adapter
from antiphon.shared.blocks import adapter_salt
from antiphon.shared.errors import ServiceError
from antiphon.shared.models.adapters import name_error


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """A LoRA adapter to compute a prompt with: a directory in peft's format.

    Adapters are identified by the content of their files. `lora_int_id` is accepted for compatibility; it must be at
    least 1 and has no effect.
    """

    lora_name: str
    lora_int_id: int = 1
    lora_path: str = ""

    def __post_init__(self) -> None:
        if why := name_error(self.lora_name):
            raise ValueError(f"lora_name: {self.lora_name!r} {why}")
        if self.lora_int_id < 1:
            raise ValueError(f"lora_int_id: {self.lora_int_id} is not at least 1")
        if not self.lora_path:
            raise ValueError("lora_path: give the directory of the adapter")


@dataclass(frozen=True, slots=True)
class PromptAdapterRequest:
    """A prompt adapter (prompt tuning) to compute a prompt with: a directory in peft's format.

    `prompt_adapter_id` is accepted for compatibility; it must be at least 1 and has no effect. The adapter's
    files say how many virtual tokens it has; `prompt_adapter_num_virtual_tokens` must be this number or 0.
    """

    prompt_adapter_name: str
    prompt_adapter_id: int = 1
    prompt_adapter_local_path: str = ""
    prompt_adapter_num_virtual_tokens: int = 0

    def __post_init__(self) -> None:
        if why := name_error(self.prompt_adapter_name):
            raise ValueError(f"prompt_adapter_name: {self.prompt_adapter_name!r} {why}")
        if self.prompt_adapter_id < 1:
            raise ValueError(f"prompt_adapter_id: {self.prompt_adapter_id} is not at least 1")
        if not self.prompt_adapter_local_path:
            raise ValueError("prompt_adapter_local_path: give the directory of the adapter")


LoRARequests = LoRARequest | Sequence[LoRARequest | None] | None
"""One adapter for all prompts of a call, or a list with one item (an adapter or None) for each prompt, or none."""
PromptAdapterRequests = PromptAdapterRequest | Sequence[PromptAdapterRequest | None] | None
Adapters = tuple[LoadedAdapter, ...]
"""The adapters of one prompt: none, one, or one of each kind."""


def loaded_adapters(
    library: AdapterLibrary | None, loras: LoRARequests, prompts: PromptAdapterRequests, count: int
) -> list[Adapters]:
    """Returns the adapters of each of `count` prompts, loaded into memory if necessary.

    Raises ValueError for a list of another length, for an unsupported adapter, and if the engine has adapters disabled;
    TypeError for a request of another type.
    """
    found: dict[LoRARequest | PromptAdapterRequest, LoadedAdapter] = {}
    asked = zip(
        paired(loras, LoRARequest, count, "lora_request", takes_none=True),
        paired(prompts, PromptAdapterRequest, count, "prompt_adapter_request", takes_none=True),
        strict=True,
    )
    adapters: list[Adapters] = []
    for pair in asked:
        given = [request for request in pair if request is not None]
        for request in given:
            if request not in found:
                found[request] = _loaded(library, request)
        adapters.append(tuple(found[request] for request in given))
    return adapters


def with_adapters(spec: SequenceSpec, adapters: Adapters) -> SequenceSpec:
    """Returns the spec with the adapters and their cache salt."""
    for adapter in adapters:
        salt = adapter_salt(spec.cache_salt, adapter.version)
        spec = replace(with_adapter(spec, adapter), cache_salt=salt)
    return spec


def _loaded(library: AdapterLibrary | None, request: LoRARequest | PromptAdapterRequest) -> LoadedAdapter:
    if isinstance(request, LoRARequest):
        field, option, name, path = "lora_request", "enable_lora", request.lora_name, request.lora_path
    else:
        field, option = "prompt_adapter_request", "enable_prompt_adapter"
        name, path = request.prompt_adapter_name, request.prompt_adapter_local_path
    if library is None:
        raise ValueError(f"{field}: this engine serves no adapters: create it with {option}=True.")
    try:
        found = library.load(name, path)
    except ServiceError as error:
        raise ValueError(error.message) from None
    if isinstance(request, LoRARequest) == bool(found.num_virtual_tokens):
        kind = "a prompt adapter" if found.num_virtual_tokens else "a LoRA adapter"
        raise ValueError(f"{field}: the adapter {name!r} is {kind}.")
    if isinstance(request, PromptAdapterRequest):
        given = request.prompt_adapter_num_virtual_tokens
        if given not in (0, found.num_virtual_tokens):
            raise ValueError(
                f"prompt_adapter_num_virtual_tokens: {given} were given, and the adapter {name!r} has "
                f"{found.num_virtual_tokens}."
            )
    return found
