"""Settings: one frozen dataclass per service, read once from flags, then environment, then defaults.

Each field is a flag: `max_num_seqs` is `--max-num-seqs` (or `--max_num_seqs`). A field may also name an environment
variable; a flag has precedence over the variable, and an empty variable counts as unset. A service reads settings from
the environment only here. Values that follow from the model or the machine are not settings: they are determined at
start-up. `shared.flags` turns fields into flags; its names are re-exported here, so that one import is enough for code
that uses settings. Groups of settings about one subject are in `shared.settings`.
"""

from shared import limits
from shared.distributed import world
from shared.flags import (
    AT_LEAST_1,
    FRACTION,
    JSON_WORDS,
    NOT_NEGATIVE,
    POSITIVE,
    POWER_OF_TWO,
    SHARE,
    SettingsError,
    add_flags,
    changed,
    flag,
    normalise,
    parse,
    parse_words,
    to_argv,
    validated,
)
from shared.settings import quantization
from shared.settings.allowed_values import (
    API_KEYS,
    CONV_TEMPLATE,
    LOGPROBS,
    LORA_RANK,
    MODEL_ALIASES,
    MODEL_NAME,
    REASONING_PARSERS,
    TEMPERATURE,
    TOOL_CALL_PARSERS,
    USAGE_SINK,
)
from shared.settings.bus import BusSettings
from shared.settings.hf_overrides import HF_OVERRIDES
from shared.settings.parallel import ParallelSettings
from shared.settings.pictures import EnginePictureSettings, GatewayPictureSettings
from shared.settings.records import RecordSettings
from shared.settings.self_test import SelfTestSettings

__all__ = [
    "AT_LEAST_1",
    "BusSettings",
    "DetokenizerSettings",
    "EngineSettings",
    "GatewaySettings",
    "ModelSettings",
    "SettingsError",
    "TokenizerSettings",
    "VisionSettings",
    "add_flags",
    "changed",
    "check_engine",
    "flag",
    "normalise",
    "parse",
    "parse_words",
    "to_argv",
    "validated",
]


class ModelSettings(BusSettings):
    """Settings of every service that reads the model's files."""

    model: str = flag(
        "",
        "directory of the model, a GGUF file, or a name on the Hugging Face hub (default: the demo model)",
        env="MODEL_PATH",
        alias=("--model-path",),
        group="model",
    )
    revision: str = flag("", "branch, tag or commit of a model from the hub (default: main)", group="model")
    download_dir: str = flag(
        "", "directory of the cache for models from the hub (default: that of HF_HOME)", group="model"
    )
    load_format: str = flag(
        "auto",
        "files of the weights: safetensors, or without them PyTorch's .bin files or GGUF; others: only those",
        choices=("auto", "safetensors", "gguf"),
        group="model",
    )
    hf_overrides: str = flag(
        "",
        "JSON object with fields of config.json that replace or extend those of the model's file; objects are merged",
        rule=HF_OVERRIDES,
        group="model",
        metavar="JSON",
    )
    model_id: str = flag(
        "",
        "the model's name in requests ('model') unless --served-model-name is given; also selects a conversation "
        "template (default: that of ti_model_config.json in the model's directory)",
        env="MODEL_ID",
        rule=MODEL_NAME,
        group="model",
    )
    served_model_name: str = flag(
        "",
        "name of the model in requests ('model'), optionally followed by further names (default: --model-id, or "
        "else the value of --model)",
        rule=MODEL_NAME,
        group="model",
        more="served_model_alias",
    )
    served_model_alias: str = flag(
        "",
        "further names that requests may use, separated by commas; answers contain the first name",
        rule=MODEL_ALIASES,
        group="model",
    )
    task: str = flag("generate", "task of the model", choices=("generate",), group="model")
    trust_remote_code: bool = flag(
        False,
        "run Python code that comes with the model or the tokenizer, unless Antiphon replaces it",
        group="model",
    )
    tokenizer: str = flag("", "directory or hub name of the tokenizer (default: the model's)", group="model")
    tokenizer_revision: str = flag(
        "", "branch, tag or commit of a tokenizer from the hub (default: the model's)", group="model"
    )
    tokenizer_mode: str = flag(
        "auto",
        "auto: tokenizer.json if it exists; slow: the tokenizer's class in transformers",
        choices=("auto", "slow"),
        group="model",
    )
    tokenizer_extension_path: str = flag(
        "", "Python file that creates the tokenizer: get_tokenizer(path, **options) or a class Tokenizer", group="model"
    )
    skip_tokenizer_init: bool = flag(False, "load no tokenizer: prompts and answers are token ids", group="model")
    chat_template: str = flag(
        "", "file with a Jinja chat template, or the template itself; for a reranker its score template", group="model"
    )
    conv_template: str | None = flag(
        None,
        "name of the conversation template that is used without --chat-template, such as qwen-7b-chat (default: that "
        "of ti_model_config.json in the model's directory, or else the tokenizer's own)",
        env="CONV_TEMPLATE",
        rule=CONV_TEMPLATE,
        group="model",
    )


class EngineSettings(ParallelSettings, SelfTestSettings, ModelSettings, EnginePictureSettings):
    """Settings of an engine."""

    max_model_len: int | None = flag(
        None,
        "longest context, prompt and output (default: the model's)",
        env="MAX_MODEL_LEN",
        rule=AT_LEAST_1,
        group="engine: scheduling",
    )
    max_num_seqs: int = flag(
        256, "largest number of sequences that run at once", rule=AT_LEAST_1, group="engine: scheduling"
    )
    limit_worker_concurrency: int | None = flag(
        None,
        "largest number of sequences that an engine computes at once, even if --max-num-seqs is larger; others wait",
        env="MAX_CONCURRENCY",
        rule=AT_LEAST_1,
        group="engine: scheduling",
    )
    max_num_batched_tokens: int | None = flag(
        None,
        "largest number of tokens computed in one step (default: 2048; on a CPU one for each running sequence and "
        "512 of prompts, 1024 of these with AMX or PyTorch)",
        rule=AT_LEAST_1,
        group="engine: scheduling",
    )
    enable_chunked_prefill: bool = flag(True, "split long prompts over steps", group="engine: scheduling")
    max_batch_size: int | None = flag(
        None,
        "gather new requests into batches of at most this many (default: each starts when there is room)",
        env="MAX_BATCH_SIZE",
        rule=AT_LEAST_1,
        group="engine: scheduling",
    )
    batch_wait_timeout: float | None = flag(
        None,
        "longest wait for a batch to fill, seconds (default with --max-batch-size: 0.1)",
        env="BATCH_WAIT_TIMEOUT",
        rule=NOT_NEGATIVE,
        group="engine: scheduling",
    )
    scheduler_delay_factor: float = flag(
        0.0,
        "while requests run, delay new ones by this factor times the duration of the last step that admitted some",
        rule=NOT_NEGATIVE,
        group="engine: scheduling",
    )
    num_scheduler_steps: int = flag(
        1,
        "number of steps whose tokens are sent together: above 1, fewer messages but less even streams",
        rule=AT_LEAST_1,
        group="engine: scheduling",
    )
    disable_async_output_proc: bool = flag(
        False, "send a step's tokens before the next step begins, not during it", group="engine: scheduling"
    )
    use_lookahead: bool = flag(
        False,
        "speculative decoding with draft tokens from the request's own text; the output stays the same",
        env="USE_LOOKAHEAD",
        group="engine: scheduling",
    )
    num_speculative_tokens: int = flag(
        8,
        "largest number of draft tokens in a step, with --use-lookahead",
        env="NUM_SPECULATIVE_TOKENS",
        rule=AT_LEAST_1,
        group="engine: scheduling",
    )
    use_v2_block_manager: bool = flag(False, "required together with --use-lookahead", group="engine: scheduling")
    gpu_memory_utilization: float = flag(
        0.9,
        "share of the device's memory to use, on a CPU of --kv-cache-memory-gb, above 0 up to 1",
        env="GPU_MEMORY_UTILIZATION",
        rule=SHARE,
        group="engine: memory",
    )
    kv_cache_memory_gb: float = flag(
        1.0,
        "memory for the KV cache on a CPU, GiB, of which a share is used (at most what is free)",
        rule=POSITIVE,
        group="engine: memory",
    )
    block_size: int = flag(64, "tokens in one KV block, a power of two", rule=POWER_OF_TWO, group="engine: memory")
    num_gpu_blocks_override: int | None = flag(
        None, "number of KV blocks instead of deriving it from memory", rule=AT_LEAST_1, group="engine: memory"
    )
    kv_cache_dtype: str = flag(
        "auto",
        "type of the KV cache: the model's, or 8 bits, twice the context in the same memory (fp8: fp8_e4m3)",
        choices=("auto", "fp8", "fp8_e4m3", "fp8_e5m2"),
        group="engine: memory",
    )
    kv_cache_ratio: float | None = flag(
        None,
        "largest share of KV blocks in use at which new requests are admitted while others run (default: 1)",
        rule=FRACTION,
        group="engine: memory",
    )
    enable_prefix_caching: bool = flag(True, "reuse KV blocks of equal prefixes", group="engine: memory")
    swap_space: float | None = flag(
        None,
        "host memory for preempted requests, GiB (default: 4, or half of the free memory if that is less; 0: they "
        "are recomputed)",
        rule=NOT_NEGATIVE,
        group="engine: memory",
    )
    cpu_offload_gb: float = flag(
        0.0,
        "weights in host memory, GiB (on a CPU they all are; not supported on other devices)",
        rule=NOT_NEGATIVE,
        group="engine: memory",
    )
    advice_spelling: str = flag(
        "flags",
        "how messages about lack of memory spell settings; the commands that start engines set it",
        choices=("flags", "variables", "arguments"),
        group="engine: memory",
    )
    dtype: str = flag(
        "auto",
        "type of weights and activations",
        env="DTYPE",
        choices=("auto", "half", "float16", "bfloat16", "float", "float32"),
        group="engine: execution",
    )
    quantization: str = flag(
        "",
        "format of the weights: ifq (8 bits), ifq_w8a8 (8 bits, activations too), ifq_nf4 (4 bits), on a CPU ifq_w4a8 "
        "(4 bits, activations in 8) and, on a GPU that supports it, fp8 quantize plain weights while loading; names of "
        "other formats only confirm the format of the model's files; auto: the files' format, or else ifq (default: "
        "the files' format)",
        env="QUANTIZATION",
        choices=quantization.NAMES,
        alias=("-q",),
        group="engine: execution",
    )
    device: str = flag("auto", "where the model runs", choices=("auto", "cpu", "cuda"), group="engine: execution")
    threads: int = flag(
        0, "threads that compute on a CPU (0: one for each core)", rule=NOT_NEGATIVE, group="engine: execution"
    )
    cpu_backend: str = flag(
        "auto",
        "what computes on a CPU: code compiled for this processor if it supports the model, PyTorch's operations, "
        "or (for tests, with TRITON_INTERPRET=1, very slowly) the kernels for GPUs",
        choices=("auto", "torch", "triton"),
        group="engine: execution",
    )
    cuda_backend: str = flag(
        "auto",
        "what computes on a CUDA device: Triton kernels if they support the model, or PyTorch's operations",
        choices=("auto", "torch"),
        group="engine: execution",
    )
    compile_cache: str = flag(
        "", "directory of compiled code (default: ~/.cache/antiphon/cpu)", group="engine: execution"
    )
    weight_cache: str = flag(
        "",
        "directory of weights packed for the CPU, mapped by later starts and by all engines of the machine; 'off': "
        "no cache (default: ~/.cache/antiphon/weights)",
        group="engine: execution",
    )
    role: str = flag(
        "both",
        "what the engine computes: whole requests; prefill: prompts for decode engines; decode: outputs, with KV "
        "from prefill engines",
        choices=("both", "prefill", "decode"),
        group="engine: KV transfer",
    )
    kv_host: str = flag(
        "",
        "address at which decode engines reach a prefill engine (default: the local address of the connection to "
        "the NATS server)",
        group="engine: KV transfer",
    )
    kv_bind: str = flag(
        "",
        "address on which a prefill engine listens for decode engines (default: --kv-host)",
        group="engine: KV transfer",
    )
    enable_lora: bool = flag(
        False, "serve LoRA adapters, which are listed in --lora-modules or loaded at run time", group="adapters"
    )
    lora_modules: tuple[str, ...] = flag(
        (),
        'LoRA adapters in peft\'s format to serve beside the model: NAME=DIRECTORY, or {"name", "path", '
        '"base_model_name"} as JSON; several words, and may be repeated; implies --enable-lora',
        group="adapters",
        metavar="NAME=DIRECTORY",
        words=True,
    )
    lora_root: tuple[str, ...] = flag(
        (),
        "directories below which the adapters must be that requests load (default: any directory)",
        group="adapters",
        metavar="DIRECTORY",
        words=True,
    )
    max_loras: int | None = flag(
        None,
        "largest number of adapters that running requests use at once (default: 8, or as many as --lora-modules names)",
        rule=AT_LEAST_1,
        group="adapters",
    )
    max_lora_rank: int = flag(16, "largest rank of an adapter", rule=LORA_RANK, group="adapters")
    max_cpu_loras: int | None = flag(
        None,
        "largest number of adapters kept in main memory; others are read again when requests need them (default: "
        "--max-loras, or as many as --lora-modules names)",
        rule=AT_LEAST_1,
        group="adapters",
    )
    enable_prompt_adapter: bool = flag(
        False, "serve prompt adapters (prompt tuning), which are listed in --prompt-adapters", group="adapters"
    )
    prompt_adapters: tuple[str, ...] = flag(
        (),
        "prompt adapters in peft's format to serve beside the model, in the forms of --lora-modules; implies "
        "--enable-prompt-adapter",
        group="adapters",
        metavar="NAME=DIRECTORY",
        words=True,
    )
    max_prompt_adapters: int | None = flag(
        None,
        "largest number of prompt adapters that running requests use at once, and that are kept in main memory "
        "(default: 8, or as many as --prompt-adapters names)",
        rule=AT_LEAST_1,
        group="adapters",
    )
    max_prompt_adapter_token: int = flag(
        128, "largest number of virtual tokens of a prompt adapter", rule=AT_LEAST_1, group="adapters"
    )
    use_warmup: bool = flag(
        False, "run artificial requests before the engine counts as ready", group="engine: execution"
    )
    enforce_eager: bool = flag(
        False,
        "no CUDA graphs: slower, less memory (on a CPU there are none)",
        env="ENFORCE_EAGER",
        group="engine: execution",
    )
    max_seq_len_to_capture: int = flag(
        8192,
        "longest sequence that CUDA graphs cover; longer ones run without",
        rule=AT_LEAST_1,
        group="engine: execution",
    )
    max_context_len_to_capture: int | None = flag(
        None, "former name of --max-seq-len-to-capture", rule=AT_LEAST_1, group="engine: execution"
    )


def check_engine(settings: EngineSettings) -> None:
    """Raises SettingsError if settings of an engine contradict each other, independently of the model."""
    if settings.use_lookahead and not settings.use_v2_block_manager:
        raise SettingsError("--use-lookahead needs --use-v2-block-manager: add it")
    world.check(settings)
    if settings.role == "decode" and settings.swap_space == 0:
        raise SettingsError("--swap-space: a decode engine receives KV in host memory and needs some; leave it out")
    if settings.role != "prefill" and (settings.kv_host or settings.kv_bind):
        raise SettingsError("--kv-host and --kv-bind are for engines with --role=prefill: only they listen")


class TokenizerSettings(ModelSettings):
    """Settings of a tokenizer."""

    escape_special_tokens: bool = flag(
        False,
        "read special tokens in the texts of messages as ordinary text, so that no text can forge a turn",
        group="model",
    )


class DetokenizerSettings(ModelSettings):
    """Settings of a detokenizer."""


class VisionSettings(ModelSettings):
    """Settings of an image service."""

    mm_processor_kwargs: str = flag(
        "", 'arguments of the image processor, JSON such as {"max_pixels": 501760}', group="pictures", metavar="JSON"
    )
    vision_device: str = flag("cpu", "device on which images are encoded", choices=("cpu", "cuda"), group="pictures")


class GatewaySettings(BusSettings, GatewayPictureSettings, RecordSettings):
    """Settings of a gateway. They name no models: the gateway discovers models by heartbeats."""

    host: str = flag("0.0.0.0", "address to listen on", group="http")
    port: int = flag(8000, "port to listen on, 1 to 65535 (0: any free port)", group="http")
    listen_fd: int = flag(-1, "an inherited listening socket to use instead of host and port", group="http")
    api_keys: str = flag(
        "",
        "API keys that requests may use, separated by commas (default: no key required)",
        env="OPENAI_API_KEYS",
        rule=API_KEYS,
        alias=("--api-key",),
        group="http",
    )
    launcher_key: str = flag(
        "", "a key for the requests of the launcher itself", env="ANTIPHON_LAUNCHER_KEY", group="http"
    )
    use_openai: bool = flag(
        True,
        "serve OpenAI's API; otherwise only POST /generate, the health probes and /metrics, and requests name no model",
        env="USE_OPENAI",
        group="http",
    )
    api_keys_file: str = flag(
        "",
        "TOML or JSON file of keys with names, models, scopes, limits and weights; read again when it changes",
        env="ANTIPHON_API_KEYS_FILE",
        group="http",
    )
    request_timeout: float = flag(
        0.0,
        "time limit of a request, seconds; a request may set a shorter limit with 'timeout' (0: no limit)",
        rule=NOT_NEGATIVE,
        group="http",
    )
    max_queue_wait: float = flag(
        0.0,
        "refuse requests with 503 while the expected wait for an engine is longer than this, seconds (0: requests "
        "wait)",
        rule=NOT_NEGATIVE,
        group="http",
    )
    lockstep: float = flag(
        0.0,
        "share of requests, 0 to 1, that are computed by two engines, whose tokens must agree (header: "
        "X-Antiphon-Lockstep: 1)",
        rule=FRACTION,
        group="http",
    )
    usage_sink: str = flag(
        "",
        "destination of usage records besides the bus: file:PATH (lines of JSON), or a URL to which such lines are "
        "posted",
        env="ANTIPHON_USAGE_SINK",
        rule=USAGE_SINK,
        group="http",
    )
    default_model: str = flag(
        "",
        "served name of the model for requests without 'model' (default: the first model that is started here, "
        "else the first by name)",
        group="http",
    )
    seed: int | None = flag(
        None,
        "derive the seeds of requests without a seed from this number and their order, the same in each run "
        "(default, or none: random)",
        env="SEED",
        group="http",
    )
    return_token_ids: bool = flag(
        False, "answers always have token ids, not only if a request asks for them", group="http"
    )
    return_tokens_as_token_ids: bool = flag(
        False, "log probabilities always have tokens as token_id:7, not only if a request asks for it", group="http"
    )
    enable_force_include_usage: bool = flag(False, "streams always end with the token counts", group="http")
    tool_call_parser: str = flag(
        "auto",
        "format of the model's tool calls: auto recognises it from the chat template, none leaves calls in the text",
        choices=TOOL_CALL_PARSERS,
        group="http",
    )
    enable_auto_tool_choice: bool = flag(
        True, "allow 'tool_choice' auto: the model decides whether it calls a tool", group="http"
    )
    reasoning_parser: str = flag(
        "auto",
        "format of the model's reasoning: auto recognises it from the chat template, none leaves it in the text",
        choices=REASONING_PARSERS,
        group="http",
    )
    default_chat_temperature: float = flag(
        1.0,
        "temperature of chat requests without one",
        rule=TEMPERATURE,
        group="http",
    )
    max_logprobs: int = flag(
        limits.LOGPROBS_MAX,
        "largest number of candidates per token whose log probabilities a request may ask for (at most ",
        rule=LOGPROBS,
        group="http",
    )
    unknown_parameters: str = flag(
        "warn",
        "a field of a request that nobody knows: warn (answer, and name the field in X-Antiphon-Ignored) or refuse",
        choices=("warn", "refuse"),
        group="http",
    )
    long_outputs: str = flag(
        "cut",
        "a maximum of output tokens beyond what fits into the context: cut (to what fits, told in the same header) or "
        "refuse",
        choices=("cut", "refuse"),
        group="http",
    )
    files_directory: str = flag(
        "",
        "directory of uploaded files and batches; gateways with the same directory share them (default: a "
        "temporary one)",
        group="http",
    )
    required_engines: str = flag(
        "", "ids of engines that must have been there before the server counts as ready, by commas", group="http"
    )
    keep_alive_s: float = flag(15.0, "seconds between comments on a silent stream", group="http")
    root_path: str = flag(
        "",
        "path under which a proxy publishes this server, such as /llm; requests may have this prefix or not",
        group="http",
    )
    ssl_keyfile: str = flag("", "PEM file with the private key for HTTPS", group="http")
    ssl_certfile: str = flag("", "PEM file with the certificate for HTTPS", group="http")
    allowed_hosts: str = flag(
        "",
        "names at which a server without API keys may be reached besides those of its machine, as a JSON list: "
        '["*"] for all (default: none); with keys too for /admin and /metrics',
        env="ANTIPHON_ALLOWED_HOSTS",
        rule=JSON_WORDS,
        group="http",
    )
    allowed_origins: str = flag(
        "",
        'origins whose pages may use this server in a browser, as a JSON list: ["*"] for all (default: none)',
        rule=JSON_WORDS,
        group="http",
    )
    allowed_methods: str = flag(
        '["*"]', "methods that those pages may use, as a JSON list", rule=JSON_WORDS, group="http"
    )
    allowed_headers: str = flag(
        '["*"]', "headers that those pages may send, as a JSON list", rule=JSON_WORDS, group="http"
    )
    allow_credentials: bool = flag(False, "allow those pages to send credentials such as cookies", group="http")
