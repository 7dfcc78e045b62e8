"""Settings of models that several devices or machines share: what is a mistake, and what is not possible, and why.

An engine computes a model on one device, or with several processes of one machine on as many devices
(`services/engine/executor/multiproc.py`). `REFUSALS` is the one list of what is not possible, with what to use
instead. Called through `shared.config.check_engine`, by the launcher and by the offline API.
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


REFUSALS = (
    Refusal(
        "nnode",
        "the devices of an engine are in one machine; for several machines start services on one bus (--nats), or "
        "prefill and decode instances by rank tables (antiphon start-role)",
    ),
)
"""What is refused above 1, in the order in which it is reported."""


def spell_flag(field: str) -> str:
    """Returns the flag of a setting."""
    return f"--{field.replace('_', '-')}"


def check(settings: ParallelSettings, spell: Spelling = spell_flag) -> None:
    """Raises SettingsError for settings that are a mistake or not possible. Mistakes are reported first."""
    _check_machines(settings, spell)
    if settings.distributed_executor_backend == "ray":
        missing = "" if importlib.util.find_spec("ray") else "ray is not installed here; "
        raise SettingsError(
            f"{spell('distributed_executor_backend')} ray: {missing}the processes of an engine are started by the "
            "engine itself. Leave the option out, or use mp"
        )
    for refusal in REFUSALS:
        value: int = getattr(settings, refusal.field)
        if value > 1:
            raise SettingsError(f"{spell(refusal.field)} {value} is not supported here: {refusal.reason}")


def notices(settings: ParallelSettings, spell: Spelling = spell_flag) -> list[str]:
    """Returns a sentence for each setting that is accepted and has no effect."""
    found: list[str] = []
    if settings.disable_custom_all_reduce:
        found.append(f"{spell('disable_custom_all_reduce')} has no effect here: sums are those of torch.distributed")
    if settings.distributed_executor_backend != "auto" and world_size(settings) == 1:
        name = f"{spell('distributed_executor_backend')} {settings.distributed_executor_backend}"
        found.append(f"{name} has no effect here: an engine on one device is one process")
    return found


def world_size(settings: ParallelSettings) -> int:
    """Returns the number of processes that compute a model together, each on a device of its own."""
    return settings.tensor_parallel_size * settings.pipeline_parallel_size


def check_devices(settings: ParallelSettings, engines: int, devices: int) -> None:
    """Raises SettingsError if engines need more devices than there are.

    `engines` is the number of engines with these settings, `devices` the number of visible GPUs, 0 on a CPU.
    """
    each = world_size(settings)
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
