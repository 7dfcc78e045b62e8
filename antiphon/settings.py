"""The settings of `antiphon serve`: the settings of all services, plus the number of processes of each service.

Each service parses its own flags; `converted` extracts the settings of one service from those of the whole server.
The two other ways to start everything, `antiphon run` and the entry point `antiphon.entrypoints.openai.api_server`,
have other defaults. Called by the command line and the launcher.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from antiphon.shared.config import (
    DetokenizerSettings,
    EngineSettings,
    GatewaySettings,
    TokenizerSettings,
    VisionSettings,
    check_engine,
)
from antiphon.shared.flags import SettingsError, flag, flags_of
from antiphon.shared.models.adapters import check_adapters
from antiphon.shared.models.image_models import image_limit, processor_kwargs
from antiphon.shared.security import tls
from antiphon.shared.security.bus_permissions import Role
from antiphon.shared.settings.bus import BusSettings
from antiphon.shared.settings.engine import ExecutionSettings, SchedulerSettings
from antiphon.shared.settings.other_options import VARIABLES
from antiphon.shared.settings.parallel import ParallelSettings
from antiphon.shared.settings.records import KeeperSettings, check_records

S = TypeVar("S", bound="ServeSettings")
REPLICAS_MAX = 64
"""Largest number of processes of one service (and one model) on one machine."""
SERVICES: dict[str, type[BusSettings]] = {
    "gateway": GatewaySettings,
    "tokenizer": TokenizerSettings,
    "engine": EngineSettings,
    "detokenizer": DetokenizerSettings,
    "vision": VisionSettings,
}
MODEL_SERVICES: tuple[Role, ...] = ("tokenizer", "engine", "detokenizer", "vision")
"""Services of which each model has processes of its own."""


class ServeSettings(
    EngineSettings,
    TokenizerSettings,
    DetokenizerSettings,
    VisionSettings,
    GatewaySettings,
    KeeperSettings,
    group="processes",
):
    """The settings of a server whose processes all run on this machine."""

    host: str = flag("127.0.0.1", "address to listen on (0.0.0.0: every network of this machine)")
    also: tuple[str, ...] = flag(
        (),
        "DIR=NAME: an additional model (directory or hub name) and its served name; may be repeated",
        group="model",
        metavar="DIR=NAME",
    )
    models: str = flag(
        "",
        "TOML or JSON file with a list 'models'; an entry has 'model', 'served-model-name' and, without the "
        "dashes, any flags about the model, its engines or the number of its processes",
        group="model",
    )
    nats_credentials: str = flag(
        "",
        "file with 'user:password' for the bus, readable by its owner only; or the directory with such a file for each "
        "service that infra/nats/make_credentials.sh writes",
        env="ANTIPHON_NATS_CREDENTIALS",
        group="bus",
    )
    gateways: int = flag(
        1, "gateway processes, sharing the port; 0: none, but models for the gateways on the bus of --nats"
    )
    tokenizers: int = flag(1, "tokenizer processes of each model")
    engines: int = flag(
        1,
        "engine processes of each model; each has the whole model and, if there are GPUs, its own GPU",
        env="WORKER_NUM",
        alias=("--worker-num",),
    )
    prefill: int = flag(0, "engines of each model that compute prompts for the --decode engines, instead of --engines")
    decode: int = flag(0, "engines of each model that continue what the --prefill engines have begun")
    detokenizers: int = flag(1, "detokenizer processes of each model")
    bus_directory: str = flag(
        "", "directory in which the bus that is started here keeps what --stream-store=file writes (default: none)"
    )
    standby: str = flag(
        "auto",
        "for each engine and gateway keep a process that has imported its code and takes its place if it ends; auto: "
        "if there are several",
        choices=("auto", "on", "off"),
    )
    visions: int = flag(1, "image services of each model with --enable-mm")
    keep_former_version: float = flag(
        60.0, "seconds that the former version of a model stays loaded after `antiphon models set`, for a rollback"
    )


_ANY_NAME = '["*"]'
"""Servers that listen on every network are reached by whatever name their machine or service has there."""


class DirectSettings(ServeSettings):
    """The settings of the entry point `api_server`: it listens on every interface and seeds requests without a seed.

    The entry point also requires that a model is named.
    """

    host: str = flag("0.0.0.0", "address to listen on")
    allowed_hosts: str = _ANY_NAME
    seed: int | None = flag(0, "gives requests without a seed one, by their order: the same in each run (none: chance)")


RUN_ALIAS = "model"
"""A model name that requests to `antiphon run` may always use. Clients of such containers use only this name."""


class RunExecutionSettings(ExecutionSettings):
    """What computes, if `antiphon run` starts the engine."""

    dtype: str = flag(
        "", "type of weights and activations (default: float16, on a CPU auto); --ds-dtype with --backend=deepspeed"
    )
    enforce_eager: bool = True


class RunParallelSettings(ParallelSettings):
    """Devices of an engine that `antiphon run` starts."""

    tensor_parallel_size: int = flag(
        0,
        "devices that share each layer of the model; it must divide the number of attention heads (default: all GPUs "
        "of the container, divided by --worker-num; with --backend=deepspeed 1)",
    )


class RunSchedulerSettings(SchedulerSettings):
    """Which sequences a step computes, if `antiphon run` starts the engine."""

    limit_worker_concurrency: int | None = flag(
        None,
        "most sequences that an engine works on at once; the others wait (default: 128, with --backend=deepspeed 32)",
    )
    max_batch_size: int | None = flag(
        None, "gather new requests into batches of at most this many (default with --backend=deepspeed: 16)"
    )


class RunSettings(ServeSettings, group="processes"):
    """The settings of `antiphon run`, which a container starts; they usually come from environment variables.

    `completed` turns these settings into those that are served.
    """

    backend: str = flag("vllm", "server whose defaults are used", choices=("vllm", "deepspeed"))
    host: str = flag("0.0.0.0", "address to listen on")
    allowed_hosts: str = _ANY_NAME
    port: int = 8501
    model: str = flag("/data/model", "directory of the model, or its name on the Hugging Face hub")
    ds_dtype: str = flag(
        "",
        "type that --backend=deepspeed computes with; int8: weights of 8 bits, as --quantization=ifq (default: "
        "float16, on a CPU auto)",
        env="DS_DTYPE",
        choices=("float16", "bfloat16", "int8"),
        group="engine: execution",
    )
    default_chat_temperature: float = 0.7
    long_outputs: str = "refuse"
    served_model_alias: str = RUN_ALIAS
    advice_spelling: str = "variables"
    execution: ExecutionSettings = RunExecutionSettings()
    parallel: ParallelSettings = RunParallelSettings()
    scheduler: SchedulerSettings = RunSchedulerSettings()


class InstanceSettings(ServeSettings, group="instance"):
    """The settings of `antiphon start-role`, which starts one instance of a deployment with prefill and decode apart.

    The role follows from the rank tables.
    """

    host: str = flag("0.0.0.0", "address to listen on")
    allowed_hosts: str = _ANY_NAME
    global_rank_table_file_path: str = flag(
        "", "file with the global rank table, the same for every instance", env="GLOBAL_RANK_TABLE_FILE_PATH"
    )
    rank_table_file_path: str = flag(
        "", "file with the local rank table of this instance, which decides its role", env="RANK_TABLE_FILE_PATH"
    )
    node_ports: str = flag(
        "",
        "read by the scheduler: ports of all prefill and then all decode instances, in the global table's order, "
        "separated by commas",
        env="NODE_PORTS",
    )
    llm_tools_path: str = flag("", "directory that has PD_separate with the scripts", env="LLM_TOOLS_PATH")


_CONCURRENCY = {"vllm": 128, "deepspeed": 32}
_DEEPSPEED_BATCH_SIZE, _DEEPSPEED_BATCH_WAIT_S = 16, 0.1
NOT_FOR_USERS = frozenset(
    {
        "advice_spelling",
        "given_model",
        "launcher_key",
        "listen_fd",
        "other_listen_fds",
        "required_engines",
        "service_id",
    }
)
"""Settings that only the launcher sets. They are not offered as flags to users."""


def completed(run: RunSettings, gpus: int) -> RunSettings:
    """Returns the settings with the defaults that follow from `--backend`, the devices and `--use-lookahead`.

    `gpus`: the number of GPUs that engines may use, 0 if they compute on the CPU.
    Raises SettingsError for a `--ds-dtype` without `--backend=deepspeed`, or one that contradicts `--quantization`.
    """
    # float16 is slow on a CPU; other types have a faster backend there.
    unnamed_dtype = "float16" if gpus else "auto"
    aliases = [name for name in run.served_model_alias.split(",") if name and name != RUN_ALIAS]
    limit = run.scheduler.limit_worker_concurrency or _CONCURRENCY[run.backend]
    run = replace(
        run,
        limit_worker_concurrency=limit,
        use_v2_block_manager=run.scheduler.use_v2_block_manager or run.scheduler.use_lookahead,
        tensor_parallel_size=run.parallel.tensor_parallel_size or _cards_of_an_engine(run, gpus),
        served_model_alias=",".join((*aliases, RUN_ALIAS)),
    )
    if run.backend != "deepspeed":
        if run.ds_dtype:
            raise SettingsError("--ds-dtype needs --backend=deepspeed; use --dtype")
        return replace(run, dtype=run.execution.dtype or unnamed_dtype)
    int8 = run.ds_dtype == "int8"
    if int8 and run.execution.quantization not in ("", "ifq"):
        raise SettingsError(
            f"--ds-dtype=int8 contradicts --quantization={run.execution.quantization}: leave one of them out"
        )
    # Weights are loaded directly in the computing type, so a separate loading type (`--dtype`) has no effect.
    return replace(
        run,
        dtype=unnamed_dtype if int8 else run.ds_dtype or unnamed_dtype,
        quantization="ifq" if int8 else run.execution.quantization,
        max_batch_size=run.scheduler.max_batch_size or _DEEPSPEED_BATCH_SIZE,
        batch_wait_timeout=_DEEPSPEED_BATCH_WAIT_S
        if run.scheduler.batch_wait_timeout is None
        else run.scheduler.batch_wait_timeout,
    )


def _cards_of_an_engine(run: RunSettings, gpus: int) -> int:
    """Returns the default of `--tensor-parallel-size`: the GPUs are divided among the engines of a single model.

    On several machines it is a later default (`other_machine.divided`).
    """
    if run.backend != "vllm" or run.also or run.models or run.parallel.nnode > 1:
        return 1
    return max(1, gpus // (len(engine_roles(run)) * run.parallel.pipeline_parallel_size))


_COUNTS = {name: f"--{name}s" for name in SERVICES} | {"engine": "--engines (--worker-num)"}


def check(serve: ServeSettings) -> None:
    """Checks the settings before any process starts. Raises SettingsError.

    Covers the number of processes, the port, the engine's settings, NATS credentials, TLS files and API keys.
    """
    for name in SERVICES:
        count = getattr(serve, f"{name}s")
        if name == "gateway" and not count:
            if not serve.nats:
                raise SettingsError("--gateways=0 needs --nats: nobody could ask the models of a bus without gateways")
            continue
        if not 1 <= count <= REPLICAS_MAX:
            raise SettingsError(f"{_COUNTS[name]}: {count} is not between 1 and {REPLICAS_MAX}")
    if not 0 <= serve.port <= 65535:
        raise SettingsError(f"--port: {serve.port} is not between 0 (any free port) and 65535")
    if serve.keep_former_version < 0:
        raise SettingsError(f"--keep-former-version: {serve.keep_former_version} is not at least 0")
    _check_roles(serve)
    _check_images(serve)
    check_adapters(serve)
    if serve.nats_credentials and not serve.nats:
        raise SettingsError("--nats-credentials needs --nats: the server that is started here has its own")
    if serve.bus_replicas > 1 and not serve.nats:
        raise SettingsError(
            "--bus-replicas needs --nats with the servers of a NATS cluster: the bus that is started here is one server"
        )
    _check_bus_directory(serve)
    check_records(serve)
    if (serve.nats_tls_ca or serve.nats_tls_cert or serve.nats_tls_key) and not serve.nats:
        raise SettingsError("--nats-tls-ca, --nats-tls-cert, --nats-tls-key need --nats: a bus started here has none")
    tls.bus_context(serve)
    tls.check(serve)
    if serve.api_keys_file:
        # Imported here so that `antiphon --help` loads no decoder.
        from antiphon.shared.security.api_keys import read_keys

        read_keys(Path(serve.api_keys_file))
    if serve.mcp_servers:
        from antiphon.shared.settings.mcp_servers import read_mcp_servers

        read_mcp_servers(serve.mcp_servers)


def _check_bus_directory(serve: ServeSettings) -> None:
    if serve.bus_directory and serve.nats:
        raise SettingsError("--bus-directory is for a bus that is started here, not for that of --nats: leave it out")
    if serve.bus_directory and serve.stream_store != "file":
        raise SettingsError(
            f"--bus-directory has no effect with --stream-store={serve.stream_store}, which writes no files: add "
            "--stream-store=file, or leave --bus-directory out"
        )
    if serve.stream_store == "file" and not serve.nats and not serve.bus_directory:
        raise SettingsError(
            "--stream-store=file needs --bus-directory, a directory that outlives this command: without one the files "
            "would go with it"
        )


def engine_roles(serve: ServeSettings) -> list[tuple[str, str]]:
    """Returns the name and the role (`--role`) of each engine of a model."""
    if not serve.prefill:
        return [(f"engine-{number}", serve.kv_transfer.role) for number in range(1, serve.engines + 1)]
    counts = (("prefill", serve.prefill), ("decode", serve.decode))
    return [(f"{role}-{number}", role) for role, count in counts for number in range(1, count + 1)]


def of_role(serve: S, role: str) -> S:
    """Returns the settings of the engines with a role. Only prefill engines listen for connections of other engines."""
    return replace(serve, role=role) if role == "prefill" else replace(serve, role=role, kv_host="", kv_bind="")


def _check_images(serve: ServeSettings) -> None:
    """Checks the settings of image input without reading the model's files. Raises SettingsError."""
    if processor_kwargs(serve.mm_processor_kwargs) and not serve.enable_mm:
        raise SettingsError("--mm-processor-kwargs needs --enable-mm: without it no images are taken")
    image_limit(serve.limit_mm_per_prompt)


def _check_roles(serve: ServeSettings) -> None:
    """Checks the settings of the engines of each role. Raises SettingsError."""
    for name in ("prefill", "decode"):
        if not 0 <= getattr(serve, name) <= REPLICAS_MAX:
            raise SettingsError(f"--{name}: {getattr(serve, name)} is not between 0 and {REPLICAS_MAX}")
    if bool(serve.prefill) != bool(serve.decode):
        missing, given = ("--decode", "--prefill") if serve.prefill else ("--prefill", "--decode")
        raise SettingsError(f"{missing}: {given} needs it too, at least 1: each engine does one half of a request")
    if serve.prefill and (serve.engines != 1 or serve.kv_transfer.role != "both"):
        raise SettingsError("--prefill and --decode say which engines there are: leave out --engines and --role")
    for role in {role for _, role in engine_roles(serve)}:
        check_engine(of_role(serve, role) if serve.prefill else serve)


def child_environment(environ: Mapping[str, str], **extra: str) -> dict[str, str]:
    """Returns the environment of a child process: `environ` without the variables that settings read, plus `extra`.

    A child gets its settings as flags, but only those that differ from the defaults (`to_argv`). Without this filter, a
    variable could override a flag that the user set to the default value.
    """
    known = {item.metadata["env"] for kind in (*SERVICES.values(), InstanceSettings) for item in flags_of(kind)}
    known |= {variable.name for variable in VARIABLES}
    return {**{name: value for name, value in environ.items() if name not in known}, **extra}
