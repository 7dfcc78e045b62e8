"""The settings of an engine, by subject. `antiphon.shared.config.EngineSettings` puts them together."""

from antiphon.shared.flags import AT_LEAST_1, FRACTION, NOT_NEGATIVE, POSITIVE, POWER_OF_TWO, SHARE, Settings, flag
from antiphon.shared.settings import quantization
from antiphon.shared.settings.allowed_values import GPU_KERNELS, KV_EVENTS, LORA_RANK, SLEEP_LEVEL


class SchedulerSettings(Settings, group="engine: scheduling"):
    """Which sequences a step computes."""

    max_model_len: int | None = flag(
        None, "longest context, prompt and output (default: the model's)", env="MAX_MODEL_LEN", rule=AT_LEAST_1
    )
    max_num_seqs: int = flag(256, "largest number of sequences that run at once", rule=AT_LEAST_1)
    limit_worker_concurrency: int | None = flag(
        None,
        "largest number of sequences that an engine computes at once, even if --max-num-seqs is larger; others wait",
        env="MAX_CONCURRENCY",
        rule=AT_LEAST_1,
    )
    max_num_batched_tokens: int | None = flag(
        None,
        "largest number of tokens computed in one step (default: 2048; on a CPU one for each running sequence and "
        "512 of prompts, 1024 of these with AMX or PyTorch)",
        rule=AT_LEAST_1,
    )
    enable_chunked_prefill: bool = flag(True, "split long prompts over steps")
    max_batch_size: int | None = flag(
        None,
        "gather new requests into batches of at most this many (default: each starts when there is room)",
        env="MAX_BATCH_SIZE",
        rule=AT_LEAST_1,
    )
    batch_wait_timeout: float | None = flag(
        None,
        "longest wait for a batch to fill, seconds (default with --max-batch-size: 0.1)",
        env="BATCH_WAIT_TIMEOUT",
        rule=NOT_NEGATIVE,
    )
    scheduler_delay_factor: float = flag(
        0.0,
        "while requests run, delay new ones by this factor times the duration of the last step that admitted some",
        rule=NOT_NEGATIVE,
    )
    num_scheduler_steps: int = flag(
        1,
        "number of steps whose tokens are sent together: above 1, fewer messages but less even streams",
        rule=AT_LEAST_1,
    )
    disable_async_output_proc: bool = flag(False, "send a step's tokens before the next step begins, not during it")
    use_lookahead: bool = flag(
        False,
        "speculative decoding with draft tokens from the request's own text; the output stays the same",
        env="USE_LOOKAHEAD",
    )
    use_mtp: bool = flag(
        False,
        "speculative decoding with the layer of the checkpoint that predicts further tokens (MTP), if it has one; the "
        "output stays the same",
    )
    num_speculative_tokens: int = flag(
        8,
        "largest number of draft tokens in a step, with --use-lookahead or --use-mtp",
        env="NUM_SPECULATIVE_TOKENS",
        rule=AT_LEAST_1,
    )
    use_v2_block_manager: bool = flag(False, "required together with --use-lookahead")


class CacheSettings(Settings, group="engine: memory"):
    """Memory, above all that of the KV cache."""

    gpu_memory_utilization: float = flag(
        0.9,
        "share of the device's memory to use, on a CPU of --kv-cache-memory-gb, above 0 up to 1",
        env="GPU_MEMORY_UTILIZATION",
        rule=SHARE,
    )
    kv_cache_memory_gb: float = flag(
        1.0, "memory for the KV cache on a CPU, GiB, of which a share is used (at most what is free)", rule=POSITIVE
    )
    block_size: int = flag(64, "tokens in one KV block, a power of two", rule=POWER_OF_TWO)
    num_gpu_blocks_override: int | None = flag(
        None, "number of KV blocks instead of deriving it from memory", rule=AT_LEAST_1
    )
    kv_cache_dtype: str = flag(
        "auto",
        "type of the KV cache: the model's, or 8 bits, twice the context in the same memory (fp8: fp8_e4m3)",
        choices=("auto", "fp8", "fp8_e4m3", "fp8_e5m2"),
    )
    kv_cache_ratio: float | None = flag(
        None,
        "largest share of KV blocks in use at which new requests are admitted while others run (default: 1)",
        rule=FRACTION,
    )
    enable_prefix_caching: bool = flag(True, "reuse KV blocks of equal prefixes")
    disable_hybrid_kv_cache_manager: bool = flag(
        False, "keep the KV of layers with a sliding window whole, instead of freeing what the window has passed"
    )
    swap_space: float | None = flag(
        None,
        "host memory for preempted requests, GiB (default: 4, or half of the free memory if that is less; 0: they "
        "are recomputed)",
        rule=NOT_NEGATIVE,
    )
    kv_disk_gb: float = flag(
        0.0,
        "disk for KV that outlives the engine, GiB, shared by the engines of this machine: prompts and answers of "
        "more than 256 tokens are read from there instead of being computed again (0: none)",
        rule=NOT_NEGATIVE,
    )
    kv_disk_path: str = flag(
        "",
        "directory for --kv-disk-gb; the engines of `antiphon serve` take turns with several, separated by commas "
        "(default: ~/.cache/antiphon/kv)",
    )
    kv_events_config: str = flag(
        "",
        "KV events for other routers over ZeroMQ, as in vLLM; needs antiphon[zmq]; the second engine of a machine adds "
        "1 to the ports, and so on (default: none)",
        rule=KV_EVENTS,
        metavar="JSON",
    )
    sleep_after: float = flag(
        0.0,
        "seconds without requests after which an engine sleeps: it frees its memory until the next request, which "
        "waits meanwhile (0: never)",
        rule=NOT_NEGATIVE,
    )
    sleep_level: int = flag(
        1,
        "what a sleeping engine frees, with --sleep-after: 1: the KV cache, and on a GPU the weights too; 2: weights "
        "everywhere",
        rule=SLEEP_LEVEL,
    )
    cpu_offload_gb: float = flag(
        0.0,
        "weights in host memory, GiB (on a CPU they all are; on a GPU, with Triton kernels, layers are copied ahead of "
        "their turn)",
        rule=NOT_NEGATIVE,
    )


class KvTransferSettings(Settings, group="engine: KV transfer"):
    """Prefill and decode on engines of their own."""

    role: str = flag(
        "both",
        "what the engine computes: whole requests; prefill: prompts for decode engines; decode: outputs, with KV "
        "from prefill engines",
        choices=("both", "prefill", "decode"),
    )
    kv_host: str = flag(
        "",
        "address at which other engines reach a prefill engine, or one with --kv-replicate peer (default: the local "
        "address of the connection to the NATS server)",
    )
    kv_bind: str = flag("", "address on which such an engine listens (default: --kv-host)")
    kv_replicate: str = flag(
        "none",
        "where KV on the disk has copies; peer: also in the --kv-disk-path of an engine of another machine, which goes "
        "on with this one's requests if the machine is lost",
        choices=("none", "peer"),
    )


class AdapterSettings(Settings, group="adapters"):
    """LoRA and prompt adapters."""

    enable_lora: bool = flag(False, "serve LoRA adapters, which are listed in --lora-modules or loaded at run time")
    lora_modules: tuple[str, ...] = flag(
        (),
        'LoRA adapters in peft\'s format to serve beside the model: NAME=DIRECTORY, or {"name", "path", '
        '"base_model_name"} as JSON; several words, and may be repeated; implies --enable-lora',
        metavar="NAME=DIRECTORY",
        words=True,
    )
    lora_root: tuple[str, ...] = flag(
        (),
        "directories below which the adapters must be that requests load (default: any directory)",
        metavar="DIRECTORY",
        words=True,
    )
    max_loras: int | None = flag(
        None,
        "largest number of adapters that running requests use at once (default: 8, or as many as --lora-modules names)",
        rule=AT_LEAST_1,
    )
    max_lora_rank: int = flag(16, "largest rank of an adapter", rule=LORA_RANK)
    max_cpu_loras: int | None = flag(
        None,
        "largest number of adapters kept in main memory; others are read again when requests need them (default: "
        "--max-loras, or as many as --lora-modules names)",
        rule=AT_LEAST_1,
    )
    enable_prompt_adapter: bool = flag(
        False, "serve prompt adapters (prompt tuning), which are listed in --prompt-adapters"
    )
    prompt_adapters: tuple[str, ...] = flag(
        (),
        "prompt adapters in peft's format to serve beside the model, in the forms of --lora-modules; implies "
        "--enable-prompt-adapter",
        metavar="NAME=DIRECTORY",
        words=True,
    )
    max_prompt_adapters: int | None = flag(
        None,
        "largest number of prompt adapters that running requests use at once, and that are kept in main memory "
        "(default: 8, or as many as --prompt-adapters names)",
        rule=AT_LEAST_1,
    )
    max_prompt_adapter_token: int = flag(128, "largest number of virtual tokens of a prompt adapter", rule=AT_LEAST_1)

    @property
    def num_lora_slots(self) -> int:
        """LoRA adapters that running requests use at once, 0 if none are served. `with_adapters` has filled it in."""
        return (self.max_loras or 0) if self.enable_lora else 0


class ExecutionSettings(Settings, group="engine: execution"):
    """What computes, in which types; and the engine's tests of itself (docs/guides/second-opinion.md)."""

    canary_interval: float = flag(
        2.0,
        "seconds between two runs of the hidden test sequence by which an engine detects wrong results; longer for "
        "large models, so that it takes 1 percent of the time (0: no test sequence and no checks of the weights)",
        rule=NOT_NEGATIVE,
    )
    deterministic: bool = flag(
        False,
        "start only if the tokens of a request cannot depend on other requests (the CPU backend; on GPUs slower "
        "kernels with a fixed order of sums); a request that moves to another engine continues only on one with the "
        "same numerics",
    )
    dtype: str = flag(
        "auto",
        "type of weights and activations",
        env="DTYPE",
        choices=("auto", "half", "float16", "bfloat16", "float", "float32"),
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
    )
    device: str = flag("auto", "where the model runs", choices=("auto", "cpu", "cuda"))
    threads: int = flag(0, "threads that compute on a CPU (0: one for each core)", rule=NOT_NEGATIVE)
    cpu_backend: str = flag(
        "auto",
        "what computes on a CPU: code compiled for this processor if it supports the model, PyTorch's operations, "
        "or (for tests, with TRITON_INTERPRET=1, very slowly) the kernels for GPUs",
        choices=("auto", "torch", "triton"),
    )
    cuda_backend: str = flag(
        "auto",
        "what computes on a CUDA device: Triton kernels if they support the model, or PyTorch's operations",
        choices=("auto", "torch"),
    )
    gpu_kernels: str = flag(
        "auto",
        "what computes the products with weights on a GPU with Triton kernels: auto measures the forms at the first "
        "start and takes the fastest, measure does so at each start, reference takes those of a fixed rule, and "
        "plain=skinny|library|fixed, quantized=tiles|swapped|library|scaled and experts=tiles|library, with commas "
        "between them, name forms",
        rule=GPU_KERNELS,
    )
    compile_cache: str = flag(
        "",
        "directory of compiled code and of what was measured on a GPU (default: ~/.cache/antiphon/cpu and "
        "~/.cache/antiphon/gpu-kernels)",
    )
    weight_cache: str = flag(
        "",
        "directory of weights packed for the CPU, mapped by later starts and by all engines of the machine; 'off': "
        "no cache (default: ~/.cache/antiphon/weights)",
    )
    use_warmup: bool = flag(False, "run artificial requests before the engine counts as ready")
    enforce_eager: bool = flag(
        False, "no CUDA graphs: slower, less memory (on a CPU there are none)", env="ENFORCE_EAGER"
    )
    max_seq_len_to_capture: int = flag(
        8192, "sequences of up to this length always run in CUDA graphs; longer ones do if few run", rule=AT_LEAST_1
    )
    max_context_len_to_capture: int | None = flag(None, "former name of --max-seq-len-to-capture", rule=AT_LEAST_1)
