"""`antiphon serve` on machines other than the head: starts only the ranks of each engine.

Each rank is a child process. It waits for its engine on the head, joins it, and ends when the engine ends. The rank is
then restarted and waits for the engine's replacement. This command ends after a signal, or when a rank is refused or
crashes repeatedly.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from antiphon.launch import devices
from antiphon.settings import ServeSettings, child_environment, engine_roles, of_role
from antiphon.shared import limits
from antiphon.shared.actors.python_command import python_command
from antiphon.shared.config import EngineSettings
from antiphon.shared.distributed.machines import Machines, find_machines
from antiphon.shared.distributed.world import rank_key, world_size
from antiphon.shared.flags import SettingsError, converted, to_argv
from antiphon.shared.models.model_files import model_name
from antiphon.shared.subjects import model_token, safe_token
from antiphon.supervision.fleet import Failure, Fleet
from antiphon.supervision.processes import ChildSpec, Sink

GRACE_S = 5.0
FORCED = 130


def machines_of(models: Sequence[ServeSettings]) -> Machines | None:
    """Returns the machines on which the models are computed; None for this machine alone. Raises SettingsError."""
    first = models[0].parallel
    if len({(model.parallel.nnode, model.parallel.pod_ips) for model in models}) > 1:
        raise SettingsError("--nnode, --pod-ips: all models of a command are on the same machines")
    if first.nnode == 1:
        return None
    machines = find_machines(first)
    rank_key(first)  # raises if there is no key, before anything starts
    return machines


def divided(model: ServeSettings, visible: Sequence[str]) -> ServeSettings:
    """Returns the settings with a default for parallelism: the model is divided among all cards of all machines.

    All machines must have as many cards as this one has (`visible`). On a CPU each machine is one device.
    """
    if model.parallel.nnode == 1 or world_size(model.parallel) > 1:
        return model
    cards = 1 if model.execution.device == "cpu" else max(1, len(visible) // len(engine_roles(model)))
    return replace(model, tensor_parallel_size=model.parallel.nnode * cards)


def rank_specs(
    models: Sequence[ServeSettings], machines: Machines, environ: Mapping[str, str], gpus: Sequence[str] = ()
) -> Iterator[ChildSpec]:
    """Yields this machine's ranks of each engine of each model. `gpus`: see `launcher.make_plan`."""
    free = iter(gpus)
    port = models[0].parallel.master_port
    for number, model in enumerate(models):
        prefix = f"{model_token(model_name(model))}-" if number else ""
        for child, role in engine_roles(model):
            settings = of_role(model, role) if model.prefill else model
            own = {devices.VARIABLE: next(free)} if gpus and model.execution.device != "cpu" else {}
            for rank in machines.ranks(machines.own, world_size(model.parallel)):
                name = f"{prefix}{child}-rank-{rank}"
                member = safe_token(name, limits.MEMBER_ID_CHARS_MAX)
                flags = to_argv(converted(settings, EngineSettings, service_id=member, nats="", master_port=port))
                argv = python_command("antiphon.services.engine.executor.rank", *flags, f"--rank={rank}")
                yield ChildSpec(
                    name=name,
                    service="engine",
                    argv=argv,
                    environ=child_environment({**environ, **own}),
                    model=model_name(model),
                )
            port += 1


async def run(
    specs: Sequence[ChildSpec], machines: Machines, sink: Sink, signalled: Callable[[Fleet], Coroutine[Any, Any, None]]
) -> int:
    """Runs the ranks until `signalled` returns or until they fail, and returns the exit code."""
    fleet = Fleet(sink)
    stop = asyncio.create_task(signalled(fleet))
    place = f"machine {machines.own + 1} of {len(machines.addresses)} ({machines.address})"
    sink("antiphon", f"this is {place}: the server is at the first one, {machines.addresses[0]}")
    fleet.start(specs)
    try:
        await asyncio.wait({stop, fleet.failed}, return_when=asyncio.FIRST_COMPLETED)
        failure: Failure | None = fleet.failed.result() if fleet.failed.done() else None
        sink("antiphon", f"stopping: {failure.message}" if failure else "stopping (Ctrl-C again: at once)")
        await fleet.stop(("engine",), GRACE_S)
        sink("antiphon", f"stopped: {failure.message}" if failure else "stopped")
        return failure.exit_code if failure else (FORCED if fleet.killed else 0)
    finally:
        fleet.kill()
        stop.cancel()
        await asyncio.gather(stop, return_exceptions=True)
