"""Settings: one frozen dataclass per service, read once from flags, then environment, then defaults.

A field is a flag: `max_num_seqs` is `--max-num-seqs` (and `--max_num_seqs`) and, where it names one, an environment
variable; a flag beats the variable, an empty variable counts as unset. No other file of a service reads the
environment. Values that follow from the model or the machine are not settings: start-up returns them as facts.
"""

import argparse
import dataclasses
import os
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any, TypeVar

T = TypeVar("T", bound="BusSettings")
_BOOLEANS = {"1": True, "true": True, "0": False, "false": False}


class SettingsError(ValueError):
    """A flag or variable with an impossible value; the message names it and what is allowed."""


@dataclass(frozen=True, slots=True)
class Rule:
    """What a value must be; `text` goes on after "is not"."""

    text: str
    holds: Callable[[Any], bool]


AT_LEAST_1 = Rule("at least 1", lambda value: value >= 1)
NOT_NEGATIVE = Rule("at least 0", lambda value: 0 <= value < float("inf"))
SHARE = Rule("above 0 and at most 1", lambda value: 0 < value <= 1)
FRACTION = Rule("between 0 and 1", lambda value: 0 <= value <= 1)
POSITIVE = Rule("above 0", lambda value: value > 0)
POWER_OF_TWO = Rule("a power of two", lambda value: value >= 1 and value & (value - 1) == 0)


def flag(
    default: Any,
    help: str,
    *,
    env: str = "",
    choices: Sequence[str] = (),
    rule: Rule | None = None,
    alias: Sequence[str] = (),
    group: str = "",
) -> Any:
    """A settings field. `group` heads it in `--help`; `rule` is checked where the value is read."""
    metadata = {"help": help, "env": env, "choices": tuple(choices), "alias": tuple(alias), "group": group}
    return dataclasses.field(default=default, metadata={**metadata, "rule": rule})


@dataclass(frozen=True, kw_only=True)
class BusSettings:
    """What every service needs: the bus and its own identity."""

    nats: str = flag(
        "",
        "URL of a NATS server that is already there (several: separated by commas)",
        env="ANTIPHON_NATS",
        group="bus",
    )
    nats_credentials: str = flag(
        "",
        "file with 'user:password' for the bus, readable by its owner only",
        env="ANTIPHON_NATS_CREDENTIALS",
        group="bus",
    )
    namespace: str = flag(
        "antiphon", "deployments sharing a NATS server differ in it", env="ANTIPHON_NAMESPACE", group="bus"
    )
    service_id: str = flag("", "name of this replica on the bus (default: host name and process id)", group="bus")
    log_level: str = flag(
        "info", "least severe message to print", choices=("debug", "info", "warning", "error"), group="bus"
    )


@dataclass(frozen=True, kw_only=True)
class ModelSettings(BusSettings):
    """What every service that touches the model's files needs."""

    model: str = flag(
        "", "directory of the model (default: the demo model)", env="MODEL_PATH", alias=("--model-path",), group="model"
    )
    served_model_name: str = flag("", "name that requests give in 'model' (default: the model's own)", group="model")
    tokenizer: str = flag("", "directory of the tokenizer (default: the model's)", group="model")
    chat_template: str = flag("", "file with a Jinja chat template, or the template itself", group="model")


@dataclass(frozen=True, kw_only=True)
class EngineSettings(ModelSettings):
    """The engine."""

    dtype: str = flag(
        "auto",
        "type of weights and activations",
        env="DTYPE",
        choices=("auto", "half", "float16", "bfloat16", "float", "float32"),
        group="engine",
    )
    max_model_len: int | None = flag(
        None,
        "longest context, prompt and output (default: the model's)",
        env="MAX_MODEL_LEN",
        rule=AT_LEAST_1,
        group="engine",
    )
    max_num_seqs: int = flag(256, "most sequences running at once", rule=AT_LEAST_1, group="engine")
    max_num_batched_tokens: int | None = flag(
        None, "most tokens computed in one step (default: 2048)", rule=AT_LEAST_1, group="engine"
    )
    block_size: int = flag(16, "tokens in one KV block, a power of two", rule=POWER_OF_TWO, group="engine")
    num_gpu_blocks_override: int | None = flag(
        None, "number of KV blocks instead of deriving it from memory", rule=AT_LEAST_1, group="engine"
    )
    gpu_memory_utilization: float = flag(
        0.9,
        "share of the device's memory to use, on a CPU of --kv-cache-memory-gb, above 0 up to 1",
        env="GPU_MEMORY_UTILIZATION",
        rule=SHARE,
        group="engine",
    )
    kv_cache_memory_gb: float = flag(
        1.0,
        "memory for the KV cache on a CPU, GiB, of which a share is used (at most what is free)",
        rule=POSITIVE,
        group="engine",
    )
    kv_cache_ratio: float | None = flag(
        None,
        "share of the KV blocks up to which new requests are let in beside running ones (default: 1)",
        rule=FRACTION,
        group="engine",
    )
    kv_cache_dtype: str = flag(
        "auto",
        "type of the KV cache: the model's, or 8 bits, twice the context in the same memory (fp8: fp8_e4m3)",
        choices=("auto", "fp8", "fp8_e4m3", "fp8_e5m2"),
        group="engine",
    )
    cpu_offload_gb: float = flag(
        0.0,
        "weights in host memory, GiB (on a CPU they all are; not supported on other devices)",
        rule=NOT_NEGATIVE,
        group="engine",
    )
    use_warmup: bool = flag(False, "run made-up requests before the engine counts as ready", group="engine")
    swap_space: float | None = flag(
        None,
        "host memory for preempted requests, GiB (default: 4, or half of what is free; 0: they are computed again)",
        rule=NOT_NEGATIVE,
        group="engine",
    )
    scheduler_delay_factor: float = flag(
        0.0,
        "hold new requests back beside running ones for this many times the last step that let some in",
        rule=NOT_NEGATIVE,
        group="engine",
    )
    use_lookahead: bool = flag(
        False,
        "guess tokens from the request's own text and check several in one step; the output stays the same",
        env="USE_LOOKAHEAD",
        group="engine",
    )
    num_speculative_tokens: int = flag(
        8,
        "most tokens guessed in a step, with --use-lookahead",
        env="NUM_SPECULATIVE_TOKENS",
        rule=AT_LEAST_1,
        group="engine",
    )
    use_v2_block_manager: bool = flag(False, "required together with --use-lookahead", group="engine")
    num_scheduler_steps: int = flag(
        1,
        "steps whose tokens leave together: above 1, fewer messages and less even streams",
        rule=AT_LEAST_1,
        group="engine",
    )
    disable_async_output_proc: bool = flag(
        False, "publish a step's tokens before the next step, not beside it", group="engine"
    )
    enable_prefix_caching: bool = flag(True, "reuse KV blocks of equal prefixes", group="engine")
    enable_chunked_prefill: bool = flag(True, "split long prompts over steps", group="engine")
    seed: int = flag(0, "seed of the engine's own draws (dummy weights)", env="SEED", group="engine")
    device: str = flag("auto", "where the model runs", choices=("auto", "cpu", "cuda"), group="engine")
    threads: int = flag(0, "threads that compute on a CPU (0: one for each core)", rule=NOT_NEGATIVE, group="engine")
    cpu_backend: str = flag(
        "auto",
        "what computes on a CPU: code compiled for this processor where it serves the model, or PyTorch's operations",
        choices=("auto", "torch"),
        group="engine",
    )
    compile_cache: str = flag("", "directory of compiled code (default: ~/.cache/antiphon/cpu)", group="engine")


@dataclass(frozen=True, kw_only=True)
class TokenizerSettings(ModelSettings):
    """The tokenizer pool."""


@dataclass(frozen=True, kw_only=True)
class DetokenizerSettings(ModelSettings):
    """The detokenizer."""


@dataclass(frozen=True, kw_only=True)
class GatewaySettings(BusSettings):
    """The gateway. It learns the models from the engines' heartbeats."""

    host: str = flag("0.0.0.0", "address to listen on", group="http")
    port: int = flag(8000, "port to listen on", group="http")
    listen_fd: int = flag(-1, "an inherited listening socket to use instead of host and port", group="http")
    api_keys: str = flag(
        "",
        "keys that requests may carry, separated by commas (default: no key needed)",
        env="OPENAI_API_KEYS",
        alias=("--api-key",),
        group="http",
    )
    keep_alive_s: float = flag(15.0, "seconds between comments on a silent stream", group="http")


def add_flags(parser: argparse.ArgumentParser, settings: type[BusSettings], skip: frozenset[str] = frozenset()) -> None:
    """Adds one option for each field that the parser does not have yet. Unset options stay None."""
    groups: dict[str, Any] = {}
    for item in fields(settings):
        if item.name in skip or _has(parser, item.name):
            continue
        title = item.metadata["group"]
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        groups[title].add_argument(*_option_names(item), **_option_arguments(item))


def parse(settings: type[T], options: argparse.Namespace, environ: Mapping[str, str] | None = None) -> T:
    """Settings from parsed options, the environment and defaults. Raises SettingsError."""
    environ = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    for item in fields(settings):
        given, source = getattr(options, item.name, None), _option_names(item)[0]
        name = item.metadata["env"]
        if given is None and name and environ.get(name, "") != "":
            source = f"environment variable {name}"
            given = _convert(item, environ[name], source)
        if given is not None:
            _check(item, given, source)
            values[item.name] = given
    return settings(**values)


def to_argv(settings: BusSettings) -> list[str]:
    """The flags that give these settings again: how a launcher passes them to a child."""
    argv: list[str] = []
    for item in fields(settings):
        value = getattr(settings, item.name)
        if value != item.default:
            argv.append(f"--{item.name.replace('_', '-')}={str(value).lower() if isinstance(value, bool) else value}")
    return argv


def normalise(argv: Sequence[str]) -> list[str]:
    """Treats '-' and '_' in option names as the same character."""
    return [_dashed(word) if word.startswith("--") else word for word in argv]


def _dashed(word: str) -> str:
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value


def _has(parser: argparse.ArgumentParser, name: str) -> bool:
    return any(action.dest == name for action in parser._actions)  # pyright: ignore[reportPrivateUsage]


def _option_names(item: "Field[Any]") -> list[str]:
    return [f"--{item.name.replace('_', '-')}", *item.metadata["alias"]]


def _option_arguments(item: "Field[Any]") -> dict[str, Any]:
    kind = _kind(item)
    default = "" if item.default in (None, "") else f" (default: {item.default})"
    variable = f" [{item.metadata['env']}]" if item.metadata["env"] else ""
    arguments: dict[str, Any] = {"dest": item.name, "default": None, "help": item.metadata["help"] + default + variable}
    if kind is bool:
        return {**arguments, "nargs": "?", "const": True, "type": _boolean, "metavar": "true|false"}
    if item.metadata["choices"]:
        return {**arguments, "choices": item.metadata["choices"]}
    return {**arguments, "type": kind, "metavar": kind.__name__.upper()}


def _check(item: "Field[Any]", value: Any, source: str) -> None:
    rule: Rule | None = item.metadata["rule"]
    if rule is not None and not rule.holds(value):
        raise SettingsError(f"{source}: {value} is not {rule.text}")


def _convert(item: "Field[Any]", text: str, source: str) -> Any:
    kind = _kind(item)
    try:
        value = _boolean(text) if kind is bool else kind(text)
    except (ValueError, argparse.ArgumentTypeError) as error:
        raise SettingsError(f"{source}: {text!r} is not a valid {kind.__name__}") from error
    choices = item.metadata["choices"]
    if choices and value not in choices:
        raise SettingsError(f"{source}: {text!r} is not one of {', '.join(choices)}")
    return value


def _boolean(text: str) -> bool:
    if text.lower() not in _BOOLEANS:
        raise argparse.ArgumentTypeError(f"{text!r} is not one of 0, 1, true, false")
    return _BOOLEANS[text.lower()]


def _kind(item: "Field[Any]") -> Any:
    assert item.default is not MISSING, item.name
    hint: Any = item.type
    if isinstance(hint, types.UnionType):
        return next(t for t in typing.get_args(hint) if t is not type(None))
    return hint
