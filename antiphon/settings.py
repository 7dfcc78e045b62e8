"""The settings of `antiphon serve`: those of all four services plus how many of each to start.

Not a settings model of its own: each service still parses its own flags, and `of_service` says which values it gets.
The two other ways to start everything, `antiphon run` and the direct entry point, differ in their defaults alone.
Called by the command line and the launcher.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from shared.config import (
    AT_LEAST_1,
    BusSettings,
    DetokenizerSettings,
    EngineSettings,
    GatewaySettings,
    SettingsError,
    TokenizerSettings,
    flag,
)

T = TypeVar("T", bound=BusSettings)
REPLICAS_MAX = 64
"""Of one service on one machine."""
SERVICES: dict[str, type[BusSettings]] = {
    "gateway": GatewaySettings,
    "tokenizer": TokenizerSettings,
    "engine": EngineSettings,
    "detokenizer": DetokenizerSettings,
}


@dataclass(frozen=True, kw_only=True)
class ServeSettings(EngineSettings, TokenizerSettings, DetokenizerSettings, GatewaySettings):
    """Everything on one machine."""

    host: str = flag("127.0.0.1", "address to listen on (0.0.0.0: every network of this machine)", group="http")
    gateways: int = flag(1, "gateway processes, sharing the port", group="processes")
    tokenizers: int = flag(1, "tokenizer processes", group="processes")
    engines: int = flag(
        1,
        "engine processes, each with the whole model and, where there are GPUs, one of its own",
        env="WORKER_NUM",
        alias=("--worker-num",),
        group="processes",
    )
    detokenizers: int = flag(1, "detokenizer processes", group="processes")


@dataclass(frozen=True, kw_only=True)
class DirectSettings(ServeSettings):
    """The direct entry point: a server for every network, with the model always named and reproducible draws."""

    host: str = flag("0.0.0.0", "address to listen on", group="http")
    seed: int | None = flag(
        0,
        "gives requests without a seed one, by their order: the same in each run (none: chance)",
        env="SEED",
        group="http",
    )


@dataclass(frozen=True, kw_only=True)
class RunSettings(ServeSettings):
    """`antiphon run`: what a container starts, mostly told by variables. `completed` makes the settings to serve."""

    backend: str = flag("vllm", "whose defaults to take", choices=("vllm", "deepspeed"), group="processes")
    host: str = flag("0.0.0.0", "address to listen on", group="http")
    port: int = flag(8501, "port to listen on", group="http")
    model: str = flag(
        "/data/model",
        "directory of the model, or its name on the Hugging Face hub",
        env="MODEL_PATH",
        alias=("--model-path",),
        group="model",
    )
    dtype: str = flag(
        "float16",
        "type of weights and activations; with --backend=deepspeed --ds-dtype decides",
        env="DTYPE",
        choices=("auto", "half", "float16", "bfloat16", "float", "float32"),
        group="engine: execution",
    )
    ds_dtype: str = flag(
        "",
        "type that --backend=deepspeed computes with (default: float16)",
        env="DS_DTYPE",
        choices=("float16", "bfloat16", "int8"),
        group="engine: execution",
    )
    enforce_eager: bool = flag(
        True,
        "no CUDA graphs: slower, less memory (on a CPU there are none)",
        env="ENFORCE_EAGER",
        group="engine: execution",
    )
    limit_worker_concurrency: int | None = flag(
        None,
        "most sequences that an engine works on at once; the others wait (default: 128, with --backend=deepspeed 32)",
        env="MAX_CONCURRENCY",
        rule=AT_LEAST_1,
        group="engine: scheduling",
    )
    max_batch_size: int | None = flag(
        None,
        "gather new requests into batches of at most this many (default with --backend=deepspeed: 16)",
        env="MAX_BATCH_SIZE",
        rule=AT_LEAST_1,
        group="engine: scheduling",
    )


_CONCURRENCY = {"vllm": 128, "deepspeed": 32}
_DEEPSPEED_BATCH_SIZE = 16
NOT_FOR_USERS = frozenset({"listen_fd", "service_id"})
"""Settings that a launcher sets itself."""


def completed(run: RunSettings) -> RunSettings:
    """The settings with what the backend and lookahead imply. Raises SettingsError."""
    limit = run.limit_worker_concurrency or _CONCURRENCY[run.backend]
    run = replace(
        run,
        limit_worker_concurrency=limit,
        use_v2_block_manager=run.use_v2_block_manager or run.use_lookahead,
    )
    if run.backend != "deepspeed":
        if run.ds_dtype:
            raise SettingsError("--ds-dtype needs --backend=deepspeed; use --dtype")
        return run
    if run.ds_dtype == "int8":
        raise SettingsError("--ds-dtype: int8 weights are not supported; use float16 or bfloat16")
    # Weights are read straight into the type that computes: there is no loading precision beside it.
    return replace(run, dtype=run.ds_dtype or "float16", max_batch_size=run.max_batch_size or _DEEPSPEED_BATCH_SIZE)


def of_service(serve: ServeSettings, kind: type[T], **changes: object) -> T:
    """One service's part of the settings, with `changes` on top."""
    values: dict[str, Any] = {item.name: changes.get(item.name, getattr(serve, item.name)) for item in fields(kind)}
    return kind(**values)


_COUNTS = {name: f"--{name}s" for name in SERVICES} | {"engine": "--engines (--worker-num)"}


def check(serve: ServeSettings) -> None:
    """Refuses what no service would be asked about. Raises SettingsError."""
    for name in SERVICES:
        count = getattr(serve, f"{name}s")
        if not 1 <= count <= REPLICAS_MAX:
            raise SettingsError(f"{_COUNTS[name]}: {count} is not between 1 and {REPLICAS_MAX}")
    if not 0 <= serve.port <= 65535:
        raise SettingsError(f"--port: {serve.port} is not between 0 (any free port) and 65535")
    if serve.nats_credentials and not serve.nats:
        raise SettingsError("--nats-credentials needs --nats: the server that is started here has its own")


def child_environment(environ: Mapping[str, str], **extra: str) -> dict[str, str]:
    """The environment of a child whose settings all come as flags: without the variables that settings read.

    Otherwise a variable would fill in where the user chose a default by a flag.
    """
    known = {item.metadata["env"] for kind in SERVICES.values() for item in fields(kind)}
    return {**{name: value for name, value in environ.items() if name not in known}, **extra}
