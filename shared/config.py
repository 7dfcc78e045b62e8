"""Settings: one frozen dataclass per service, read once from flags, then environment, then defaults.

Each field is a flag: `max_num_seqs` is `--max-num-seqs` (or `--max_num_seqs`). A field may also name an environment
variable; a flag has precedence over the variable, and an empty variable counts as unset. A service reads settings from
the environment only here. Values that follow from the model or the machine are not settings: they are determined at
start-up. `shared/flags.py` turns fields into flags. Groups of settings about one subject are in `shared/settings`.
"""

from antiphon.shared import limits
from antiphon.shared.distributed import world
from antiphon.shared.flags import FRACTION, JSON_WORDS, NOT_NEGATIVE, SettingsError, flag
from antiphon.shared.settings.allowed_values import (
    API_KEYS,
    CONV_TEMPLATE,
    HF_OVERRIDES,
    LOGPROBS,
    MODEL_ALIASES,
    MODEL_NAME,
    REASONING_PARSERS,
    TEMPERATURE,
    TOOL_CALL_PARSERS,
    USAGE_SINK,
)
from antiphon.shared.settings.bus import BusSettings
from antiphon.shared.settings.engine import (
    AdapterSettings,
    CacheSettings,
    ExecutionSettings,
    KvTransferSettings,
    SchedulerSettings,
)
from antiphon.shared.settings.images import EngineImageSettings, GatewayImageSettings
from antiphon.shared.settings.kv_events import has_zmq, kv_events_of
from antiphon.shared.settings.parallel import ParallelSettings
from antiphon.shared.settings.records import RecordSettings
from antiphon.shared.settings.tools import GatewayToolSettings


class ModelSettings(BusSettings, group="model"):
    """Settings of every service that reads the model's files."""

    model: str = flag(
        "",
        "directory of the model, a GGUF file, or a name on the Hugging Face hub, org/repo or org/repo:Q4_K_M for one "
        "of its GGUF files (default: the demo model)",
        env="MODEL_PATH",
        alias=("--model-path",),
    )
    given_model: str = flag("", "what --model was before the launcher looked it up; the launcher sets it")
    revision: str = flag("", "branch, tag or commit of a model from the hub (default: main)")
    download_dir: str = flag("", "directory of the cache for models from the hub (default: that of HF_HOME)")
    load_format: str = flag(
        "auto",
        "files of the weights: safetensors, or without them PyTorch's .bin files or GGUF; others: only those; dummy: "
        "random weights without files, for measurements",
        choices=("auto", "safetensors", "gguf", "dummy"),
    )
    hf_overrides: str = flag(
        "",
        "JSON object with fields of config.json that replace or extend those of the model's file; objects are merged",
        rule=HF_OVERRIDES,
        metavar="JSON",
    )
    model_id: str = flag(
        "",
        "the model's name in requests ('model') unless --served-model-name is given; also selects a conversation "
        "template (default: that of ti_model_config.json in the model's directory)",
        env="MODEL_ID",
        rule=MODEL_NAME,
    )
    served_model_name: str = flag(
        "",
        "name of the model in requests ('model'), optionally followed by further names (default: --model-id, or "
        "else the last part of --model's path, or its hub name)",
        rule=MODEL_NAME,
        more="served_model_alias",
    )
    served_model_alias: str = flag(
        "",
        "further names that requests may use, separated by commas; answers contain the first name",
        rule=MODEL_ALIASES,
    )
    task: str = flag("generate", "task of the model", choices=("generate",))
    trust_remote_code: bool = flag(
        False, "run Python code that comes with the model or the tokenizer, unless Antiphon replaces it"
    )
    tokenizer: str = flag("", "directory or hub name of the tokenizer (default: the model's)")
    tokenizer_revision: str = flag("", "branch, tag or commit of a tokenizer from the hub (default: the model's)")
    tokenizer_mode: str = flag(
        "auto",
        "auto: tokenizer.json if it exists; slow: the tokenizer's class in transformers",
        choices=("auto", "slow"),
    )
    tokenizer_extension_path: str = flag(
        "", "Python file that creates the tokenizer: get_tokenizer(path, **options) or a class Tokenizer"
    )
    skip_tokenizer_init: bool = flag(False, "load no tokenizer: prompts and answers are token ids")
    chat_template: str = flag(
        "", "file with a Jinja chat template, or the template itself; for a reranker its score template"
    )
    conv_template: str | None = flag(
        None,
        "name of the conversation template that is used without --chat-template, such as qwen-7b-chat (default: that "
        "of ti_model_config.json in the model's directory, or else the tokenizer's own)",
        env="CONV_TEMPLATE",
        rule=CONV_TEMPLATE,
    )


class EngineSettings(ModelSettings, EngineImageSettings):
    """Settings of an engine."""

    execution: ExecutionSettings = ExecutionSettings()
    parallel: ParallelSettings = ParallelSettings()
    scheduler: SchedulerSettings = SchedulerSettings()
    cache: CacheSettings = CacheSettings()
    kv_transfer: KvTransferSettings = KvTransferSettings()
    adapters: AdapterSettings = AdapterSettings()
    advice_spelling: str = flag(
        "flags",
        "how messages about lack of memory spell settings; the commands that start engines set it",
        choices=("flags", "variables", "arguments"),
        group="engine: memory",
    )


def check_engine(settings: EngineSettings) -> None:
    """Raises SettingsError if settings of an engine contradict each other, independently of the model."""
    if settings.scheduler.use_lookahead and not settings.scheduler.use_v2_block_manager:
        raise SettingsError("--use-lookahead needs --use-v2-block-manager: add it")
    world.check(settings.parallel)
    if settings.kv_transfer.role == "decode" and settings.cache.swap_space == 0:
        raise SettingsError("--swap-space: a decode engine receives KV in host memory and needs some; leave it out")
    _check_kv_disk(settings)
    if settings.cache.sleep_level != 1 and not settings.cache.sleep_after:
        raise SettingsError("--sleep-level: without --sleep-after engines do not sleep by themselves; give it a time")
    if settings.cache.sleep_after and not world.can_sleep(settings.parallel):
        raise SettingsError(f"--sleep-after: {world.NO_SLEEP}; leave it out")
    listens = settings.kv_transfer.role == "prefill" or settings.kv_transfer.kv_replicate == "peer"
    if not listens and (settings.kv_transfer.kv_host or settings.kv_transfer.kv_bind):
        raise SettingsError(
            "--kv-host and --kv-bind are for engines with --role prefill or --kv-replicate peer: only they listen"
        )
    events = kv_events_of(settings.cache.kv_events_config)
    if events is not None and events.is_on:
        if not has_zmq():
            raise SettingsError(
                "--kv-events-config: pyzmq is not installed here. Install it (pip install 'antiphon[zmq]'), or leave "
                "the option out"
            )
        if not settings.cache.enable_prefix_caching:
            raise SettingsError(
                "--kv-events-config: the events are those of the prefix cache; leave --enable-prefix-caching on"
            )


def _check_kv_disk(settings: EngineSettings) -> None:
    if settings.cache.kv_disk_gb and settings.cache.swap_space == 0:
        raise SettingsError("--swap-space: KV from the disk is read into host memory and needs some; leave it out")
    if settings.cache.kv_disk_gb and not settings.cache.enable_prefix_caching:
        raise SettingsError(
            "--kv-disk-gb: KV on the disk belongs to the prefix cache; leave --enable-prefix-caching on"
        )
    if settings.kv_transfer.kv_replicate == "peer" and not settings.cache.kv_disk_gb:
        raise SettingsError(
            "--kv-replicate peer copies what is on the disk: give it a size with --kv-disk-gb; a --kv-disk-path in "
            "/dev/shm keeps it in memory"
        )
    if settings.cache.kv_disk_path and not settings.cache.kv_disk_gb:
        raise SettingsError("--kv-disk-path: nothing is written there without --kv-disk-gb; give it a size")


class TokenizerSettings(ModelSettings, group="model"):
    """Settings of a tokenizer."""

    escape_special_tokens: bool = flag(
        False, "read special tokens in the texts of messages as ordinary text, so that no text can forge a turn"
    )


class DetokenizerSettings(ModelSettings):
    """Settings of a detokenizer."""


class VisionSettings(ModelSettings, group="images"):
    """Settings of an image service."""

    mm_processor_kwargs: str = flag(
        "", 'arguments of the image processor, JSON such as {"max_pixels": 501760}', metavar="JSON"
    )
    vision_device: str = flag("cpu", "device on which images are encoded", choices=("cpu", "cuda"))


class GatewaySettings(BusSettings, GatewayImageSettings, GatewayToolSettings, RecordSettings, group="http"):
    """Settings of a gateway. They name no models: the gateway discovers models by heartbeats."""

    host: str = flag("0.0.0.0", "address to listen on")
    port: int = flag(8000, "port to listen on, 1 to 65535 (0: any free port)")
    listen_fd: int = flag(-1, "an inherited listening socket to use instead of host and port")
    other_listen_fds: str = flag("", "inherited listening sockets of the other gateways, with commas")
    api_keys: str = flag(
        "",
        "API keys that requests may use, separated by commas (default: no key required)",
        env="OPENAI_API_KEYS",
        rule=API_KEYS,
        alias=("--api-key",),
    )
    launcher_key: str = flag("", "a key for the requests of the launcher itself", env="ANTIPHON_LAUNCHER_KEY")
    use_openai: bool = flag(
        True,
        "serve OpenAI's API; otherwise only POST /generate, the health probes and /metrics, and requests name no model",
        env="USE_OPENAI",
    )
    api_keys_file: str = flag(
        "",
        "TOML or JSON file of keys with names, models, scopes, limits and weights; read again when it changes",
        env="ANTIPHON_API_KEYS_FILE",
    )
    access_log: bool = flag(
        True, "write a line to the log for each request when it has ended, without texts (--no-access-log: none)"
    )
    request_timeout: float = flag(
        0.0,
        "time limit of a request, seconds; a request may set a shorter limit with 'timeout' (0: no limit)",
        rule=NOT_NEGATIVE,
    )
    max_queue_wait: float = flag(
        0.0,
        "refuse requests with 503 while the expected wait for an engine is longer than this, seconds (0: requests "
        "wait)",
        rule=NOT_NEGATIVE,
    )
    lockstep: float = flag(
        0.0,
        "share of requests, 0 to 1, that are computed by two engines, whose tokens must agree (header: "
        "X-Antiphon-Lockstep: 1)",
        rule=FRACTION,
    )
    usage_sink: str = flag(
        "",
        "destination of usage records besides the bus: file:PATH (lines of JSON), or a URL to which such lines are "
        "posted",
        env="ANTIPHON_USAGE_SINK",
        rule=USAGE_SINK,
    )
    default_model: str = flag(
        "",
        "served name of the model for requests without 'model' (default: the first model that is started here, "
        "else the first by name)",
    )
    seed: int | None = flag(
        None,
        "derive the seeds of requests without a seed from this number and their order, the same in each run "
        "(default, or none: random)",
        env="SEED",
    )
    return_token_ids: bool = flag(False, "answers always have token ids, not only if a request asks for them")
    return_tokens_as_token_ids: bool = flag(
        False, "log probabilities always have tokens as token_id:7, not only if a request asks for it"
    )
    enable_force_include_usage: bool = flag(False, "streams always end with the token counts")
    tool_call_parser: str = flag(
        "auto",
        "format of the model's tool calls: auto recognises it from the chat template, none leaves calls in the text",
        choices=TOOL_CALL_PARSERS,
    )
    enable_auto_tool_choice: bool = flag(True, "allow 'tool_choice' auto: the model decides whether it calls a tool")
    reasoning_parser: str = flag(
        "auto",
        "format of the model's reasoning: auto recognises it from the chat template, none leaves it in the text",
        choices=REASONING_PARSERS,
    )
    default_chat_temperature: float = flag(1.0, "temperature of chat requests without one", rule=TEMPERATURE)
    max_logprobs: int = flag(
        limits.LOGPROBS_MAX,
        "largest number of candidates per token whose log probabilities a request may ask for",
        rule=LOGPROBS,
    )
    unknown_parameters: str = flag(
        "warn",
        "a field of a request that nobody knows: warn (answer, and name the field in X-Antiphon-Ignored) or refuse",
        choices=("warn", "refuse"),
    )
    long_outputs: str = flag(
        "cut",
        "a maximum of output tokens beyond what fits into the context: cut (to what fits, told in the same header) or "
        "refuse",
        choices=("cut", "refuse"),
    )
    files_directory: str = flag(
        "",
        "directory of uploaded files and batches; gateways with the same directory share them (default: a "
        "temporary one)",
    )
    required_engines: str = flag(
        "", "ids of engines that must have been there before the server counts as ready, by commas"
    )
    keep_alive_s: float = flag(15.0, "seconds between comments on a silent stream")
    root_path: str = flag(
        "", "path under which a proxy publishes this server, such as /llm; requests may have this prefix or not"
    )
    ssl_keyfile: str = flag("", "PEM file with the private key for HTTPS")
    ssl_certfile: str = flag("", "PEM file with the certificate for HTTPS")
    allowed_hosts: str = flag(
        "",
        "names at which a server without API keys may be reached besides those of its machine, as a JSON list: "
        '["*"] for all (default: none); with keys too for /admin and /metrics',
        env="ANTIPHON_ALLOWED_HOSTS",
        rule=JSON_WORDS,
    )
    allowed_origins: str = flag(
        "",
        'origins whose pages may use this server in a browser, as a JSON list: ["*"] for all (default: none)',
        rule=JSON_WORDS,
    )
    allowed_methods: str = flag('["*"]', "methods that those pages may use, as a JSON list", rule=JSON_WORDS)
    allowed_headers: str = flag('["*"]', "headers that those pages may send, as a JSON list", rule=JSON_WORDS)
    allow_credentials: bool = flag(False, "allow those pages to send credentials such as cookies")
