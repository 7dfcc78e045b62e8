"""Checks the settings of models that run on several devices or machines, and explains invalid combinations.

An engine computes a model on one device, or with several processes on as many devices, of one machine or of several
(`services/engine/executor`). Called through `check_engine` (`shared/config.py`), by the launcher and the offline API.
"""

import importlib.util
import ipaddress
import os
from collections.abc import Callable, Mapping

from antiphon.shared.distributed.cluster_key import read_key
from antiphon.shared.distributed.machines import addresses
from antiphon.shared.flags import SettingsError
from antiphon.shared.settings.parallel import ParallelSettings

AGAIN = 75
"""Exit code of a rank on another machine when its engine has ended. The rank should be restarted; it then waits for the
next engine.
"""
RAY_ADDRESS = "RAY_ADDRESS"
NO_KV = "engines whose processes are on several machines, or started by Ray, exchange no KV"
NO_SLEEP = "engines whose processes are on several machines, or started by Ray, do not sleep"


Spelling = Callable[[str], str]
"""Returns how messages call a setting, given the name of its field: `--pod-ips` for `pod_ips` on a command line."""


def spell_flag(field: str) -> str:
    """Returns the flag of a setting."""
    return f"--{field.replace('_', '-')}"


def check(settings: ParallelSettings, spell: Spelling = spell_flag) -> None:
    """Raises SettingsError for settings that are wrong or not possible."""
    _check_machines(settings, spell)
    if settings.distributed_executor_backend == "ray":
        name = f"{spell('distributed_executor_backend')} ray"
        if not has_ray():
            raise SettingsError(
                f"{name}: ray is not installed here. Install it (pip install 'antiphon[ray]'), or use mp"
            )
        if settings.nnode > 1:
            raise SettingsError(
                f"{name}: Ray knows its machines; leave out {spell('nnode')} and {spell('pod_ips')}, or use mp"
            )
    size = world_size(settings)
    if size % settings.nnode:
        raise SettingsError(
            f"{spell('nnode')} {settings.nnode}: {size} processes ({spell('tensor_parallel_size')} x "
            f"{spell('pipeline_parallel_size')}) cannot be divided among {settings.nnode} machines equally"
        )


def has_ray() -> bool:
    """Whether ray is installed."""
    return importlib.util.find_spec("ray") is not None


def uses_ray(settings: ParallelSettings, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether Ray starts the processes of an engine.

    With `auto`, Ray is used only if RAY_ADDRESS names a cluster: on one machine the engine can start the processes
    itself.
    """
    if world_size(settings) == 1 or settings.nnode > 1:
        return False
    named = settings.distributed_executor_backend
    return named == "ray" or (named == "auto" and bool(environ.get(RAY_ADDRESS)) and has_ray())


def exchanges_kv(settings: ParallelSettings) -> bool:
    """Whether an engine can have a role: all its processes must be on this machine and started by the engine."""
    return settings.nnode == 1 and not uses_ray(settings)


def can_sleep(settings: ParallelSettings) -> bool:
    """Whether an engine can sleep: it must have started all its processes, and on this machine, to start them again."""
    return exchanges_kv(settings)


def rank_key(settings: ParallelSettings) -> bytes:
    """Returns the secret with which the machines of an engine authenticate each other. Raises SettingsError."""
    one_host = all(ipaddress.ip_address(address).is_loopback for address in addresses(settings.pod_ips))
    return read_key(settings.cluster_key_file, one_host=one_host, why="the model is on several machines")


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


def local_size(settings: ParallelSettings) -> int:
    """Returns the number of processes of an engine on each machine, each with a device; with Ray, 1."""
    return 1 if uses_ray(settings) else world_size(settings) // settings.nnode


def check_devices(settings: ParallelSettings, engines: int, devices: int) -> None:
    """Raises SettingsError if engines need more devices than there are.

    `engines` is the number of engines with these settings, `devices` the number of visible GPUs, 0 on a CPU.
    """
    each = local_size(settings)
    if each > 1 and devices and each * engines > devices:
        raise SettingsError(
            f"--tensor-parallel-size (TP) x --worker-num: {engines} engines of {each} devices need {engines * each}, "
            f"and {devices} can be used here"
        )


def check_division(tp_size: int, parts: Mapping[str, int], pp_size: int, num_layers: int) -> None:
    """Raises SettingsError if devices cannot divide a model's parts or its layers.

    `parts`: the number of each kind of part, such as 32 for `attention heads`.
    """
    for what, number in parts.items():
        if number % tp_size:
            raise SettingsError(f"--tensor-parallel-size: {tp_size} does not divide the model's {number} {what}")
    if pp_size > num_layers:
        raise SettingsError(f"--pipeline-parallel-size: {pp_size} is more than the model's {num_layers} layers")


def _check_machines(settings: ParallelSettings, spell: Spelling) -> None:
    name, every = spell("pod_ips"), addresses(settings.pod_ips)
    if not every:
        if settings.nnode > 1:
            raise SettingsError(
                f"{spell('nnode')} {settings.nnode}: {name} is needed, the addresses of all {settings.nnode} machines "
                "separated by commas"
            )
        return
    for address in every:
        try:
            ipaddress.ip_address(address)
        except ValueError as error:
            raise SettingsError(
                f"{name}: {address!r} is not an IP address; give them as 192.0.2.1,192.0.2.2"
            ) from error
    if len(set(every)) != len(every):
        raise SettingsError(f"{name}: an address is given twice in {settings.pod_ips}")
    if len(every) != settings.nnode:
        raise SettingsError(
            f"{name}: {len(every)} addresses for {spell('nnode')} {settings.nnode}; give one for each machine"
        )
