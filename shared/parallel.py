"""Settings of models that several devices or machines share: what is a mistake, and what is not possible, and why.

An engine computes on one device and holds the whole model. The settings of other servers are read and checked all the
same: a degree of 1 asks for what an engine does, a greater one is refused with what to use instead. `REFUSALS` is the
one list of these reasons. Called through `shared.config.check_engine`, by the launcher and by the offline API.
"""

import importlib.util
import ipaddress
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from shared.flags import SettingsError


class ParallelSettings(Protocol):
    """The settings that this module reads, part of the engine's."""

    @property
    def tensor_parallel_size(self) -> int:
        """Devices that share each layer."""
        ...

    @property
    def pipeline_parallel_size(self) -> int:
        """Devices that have a part of the layers each."""
        ...

    @property
    def distributed_executor_backend(self) -> str:
        """What starts the processes of several devices: auto, ray or mp."""
        ...

    @property
    def nnode(self) -> int:
        """Number of machines."""
        ...

    @property
    def pod_ips(self) -> str:
        """Addresses of the machines, separated by commas."""
        ...

    @property
    def disable_custom_all_reduce(self) -> bool:
        """Whether devices do without an own all-reduce."""
        ...


Spelling = Callable[[str], str]
"""Gives a setting's name in messages from its field: `--pod-ips` on a command line."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A setting that is not possible above 1. `reason` says why, and what to use instead."""

    field: str
    reason: str


_SMALLER = (
    "for a model that does not fit, use a smaller type (--dtype bfloat16, --kv-cache-dtype fp8) or a shorter "
    "--max-model-len"
)
_ONE_DEVICE = "an engine holds the whole model on one device"
REFUSALS = (
    Refusal("tensor_parallel_size", f"{_ONE_DEVICE}; start more engines with --engines (--worker-num), and {_SMALLER}"),
    Refusal(
        "pipeline_parallel_size", f"{_ONE_DEVICE}; start more engines with --engines (--worker-num), and {_SMALLER}"
    ),
    Refusal(
        "nnode",
        f"{_ONE_DEVICE} of one machine; for several machines start services on one bus (--nats), or prefill and decode "
        "instances by rank tables (antiphon start-role)",
    ),
)
"""What is refused above 1, in the order in which it is reported."""


def spell_flag(field: str) -> str:
    """Returns the flag of a setting."""
    return f"--{field.replace('_', '-')}"


def check(settings: ParallelSettings, spell: Spelling = spell_flag) -> None:
    """Raises SettingsError for settings that are a mistake or not possible. Mistakes are reported first."""
    _check_machines(settings, spell)
    if settings.distributed_executor_backend == "ray" and importlib.util.find_spec("ray") is None:
        raise SettingsError(
            f"{spell('distributed_executor_backend')} ray: ray is not installed here. Leave the option out: a model on "
            "one device needs no executor"
        )
    for refusal in REFUSALS:
        value: int = getattr(settings, refusal.field)
        if value > 1:
            raise SettingsError(f"{spell(refusal.field)} {value} is not supported here: {refusal.reason}")


def notices(settings: ParallelSettings, spell: Spelling = spell_flag) -> list[str]:
    """Returns a sentence for each setting that is accepted and has no effect."""
    found: list[str] = []
    if settings.disable_custom_all_reduce:
        found.append(f"{spell('disable_custom_all_reduce')} has no effect here: an engine computes on one device")
    if settings.distributed_executor_backend != "auto":
        name = f"{spell('distributed_executor_backend')} {settings.distributed_executor_backend}"
        found.append(f"{name} has no effect here: an engine on one device is one process")
    return found


def check_devices(settings: ParallelSettings, engines: int, devices: int) -> None:
    """Raises SettingsError if engines need more devices than there are.

    `engines` is the number of engines with these settings, `devices` the number of visible GPUs, 0 on a CPU.
    """
    each = settings.tensor_parallel_size * settings.pipeline_parallel_size
    if each > 1 and devices and each * engines > devices:
        raise SettingsError(
            f"--tensor-parallel-size (TP) x --worker-num: {engines} engines of {each} devices need {engines * each}, "
            f"and {devices} can be used here"
        )


def _check_machines(settings: ParallelSettings, spell: Spelling) -> None:
    name, addresses = spell("pod_ips"), [word.strip() for word in settings.pod_ips.split(",")]
    if not settings.pod_ips:
        if settings.nnode > 1:
            raise SettingsError(
                f"{spell('nnode')} {settings.nnode}: {name} is needed, the addresses of all {settings.nnode} machines "
                "separated by commas"
            )
        return
    for address in addresses:
        try:
            ipaddress.ip_address(address)
        except ValueError as error:
            raise SettingsError(
                f"{name}: {address!r} is not an IP address; give them as 192.0.2.1,192.0.2.2"
            ) from error
    if len(set(addresses)) != len(addresses):
        raise SettingsError(f"{name}: an address is given twice in {settings.pod_ips}")
    if len(addresses) != settings.nnode:
        raise SettingsError(
            f"{name}: {len(addresses)} addresses for {spell('nnode')} {settings.nnode}; give one for each machine"
        )
