"""Options and environment variables of other servers without an equal here: accepted or refused, and why.

Users may bring options of vLLM (0.4 to 0.6, and common ones of later versions) or of servers with vLLM's flags. Such an
option is either a setting (`antiphon.shared.config`), or listed here, or unknown, which ends the process with exit code
2. A listed option without effect is accepted with one notice. A listed option that would change the server's behaviour
is refused with the reason and the alternative, if there is one, unless its value has no effect
(`--data-parallel-size 1`). Called by every program that parses a command line, before its own parser. The
documentation page on settings lists this table.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from antiphon.shared.flags import SettingsError
from antiphon.shared.settings.speculation import speculation_settings

Takes = Literal["flag", "value", "values"]
_TRUE, _FALSE = ("1", "true"), ("0", "false")
_NONE = ("", "none")


@dataclass(frozen=True, slots=True, kw_only=True)
class Other:
    """Options with the same notice or refusal.

    `asks_nothing`: values, in lower case, that describe what the server does anyway; they are ignored.
    """

    names: tuple[str, ...]
    takes: Takes
    because: str
    """The notice or refusal as a sentence without its subject, the option's name."""
    refused: bool
    asks_nothing: tuple[str, ...] = ()
    instead: str = ""
    """A flag here with its value, as which the option is read; empty: there is none."""
    reads: Callable[[str], dict[str, Any]] | None = None
    """Returns the settings here, by name, as which some values of the option are read; {} for other values."""

    def settings(self, values: Sequence[str]) -> dict[str, Any]:
        """Returns the settings here, by name, as which the option with these values is read."""
        return self.reads(values[0]) if self.reads is not None and values else {}


def _no_effect(names: str, takes: Takes, because: str) -> Other:
    return Other(names=tuple(names.split()), takes=takes, because=f"has no effect here: {because}", refused=False)


def _not_here(names: str, takes: Takes, because: str, asks_nothing: tuple[str, ...] = ()) -> Other:
    nothing = _FALSE if takes == "flag" else asks_nothing
    return Other(
        names=tuple(names.split()),
        takes=takes,
        because=f"is not supported here: {because}",
        refused=True,
        asks_nothing=nothing,
    )


def _read_as(names: str, instead: str) -> Other:
    """Returns flags that have an equal here; with the value false they ask for nothing."""
    return Other(
        names=tuple(names.split()),
        takes="flag",
        because=f"is read as {instead}",
        refused=False,
        asks_nothing=_FALSE,
        instead=instead,
    )


_ENGINES = "engines do not know each other; start more of them with --engines (--worker-num)"
_EXPERTS = "experts are divided among devices with --tensor-parallel-size"
_ADAPTERS = "LoRA adapters are served with --lora-modules and --enable-lora, without their biases"
_IMAGES = "of a model with images (--enable-mm) the checkpoint says how they are read"
_LOCAL = "files of the server are not read as images: send them in the request"
_DRAFTS = "drafts come from the request's own text; use --use-lookahead with --num-speculative-tokens"
_METHODS = (
    "the methods are ngram (--use-lookahead) and mtp (--use-mtp), with 'num_speculative_tokens' "
    "(--num-speculative-tokens) and no other field"
)
_GRAMMARS = "llguidance binds output to grammars and schemas, whatever their kind"
_SHAPE = "positions are computed as config.json of the model says; change it with --hf-overrides"
_CLIENTS = "certificates of clients are not checked; put a proxy that does in front of the server"
_LOGS = "texts of requests and statistics are not logged: see --access-log, --log-level and /metrics"
_LORA_SPACE = "an adapter takes the room of its own rank, in the model's type, and adds no tokens"
_TOKENIZERS = "tokenizers are processes of their own; their number is --tokenizers"
_PREFILLS = "prompts are computed in their order, as many as a step has tokens for"
_RAY = "--distributed-executor-backend=ray"
_ROLES = "engines that compute prompts and engines that continue them are started with --prefill and --decode"
_TASKS = "what a model can do follows from its files: it generates text, gives embeddings or classifies"

OPTIONS: tuple[Other, ...] = (
    # accepted
    _read_as("--disable-log-requests --disable-uvicorn-access-log", "--no-access-log"),
    _read_as("--enable-log-requests", "--access-log"),
    _no_effect("--disable-log-stats", "flag", _LOGS),
    _no_effect("--max-log-len --uvicorn-log-level", "value", _LOGS),
    _read_as("--worker-use-ray", _RAY),
    _no_effect("--engine-use-ray", "flag", f"an engine is a process of its own; Ray starts its ranks with {_RAY}"),
    _no_effect("--ray-workers-use-nsight", "flag", "ranks that Ray starts are not profiled"),
    _no_effect("--guided-decoding-backend", "value", _GRAMMARS),
    _no_effect("--tokenizer-pool-size --tokenizer-pool-type --tokenizer-pool-extra-config", "value", _TOKENIZERS),
    _no_effect("--enable-reasoning", "flag", "reasoning is separated without it (--reasoning-parser)"),
    _no_effect("--max-parallel-loading-workers", "value", "an engine loads its weights alone"),
    _no_effect("--num-lookahead-slots", "value", "drafted tokens need no slots of their own"),
    _no_effect("--preemption-mode", "value", "blocks of preempted requests are kept where --swap-space has room"),
    _no_effect("--lora-extra-vocab-size --lora-dtype", "value", _LORA_SPACE),
    _no_effect("--fully-sharded-loras", "flag", "an adapter is divided among devices as the model's matrices are"),
    _no_effect("--model-loader-extra-config --ignore-patterns", "value", "the loader reads only the model's own files"),
    _no_effect("--max-num-partial-prefills --max-long-partial-prefills", "value", _PREFILLS),
    _no_effect("--long-prefill-token-threshold", "value", _PREFILLS),
    _no_effect("--disable-frontend-multiprocessing", "flag", "each service is a process of its own"),
    _no_effect("--enable-prompt-tokens-details --enable-request-id-headers", "flag", "answers always have them"),
    _no_effect(
        "--compilation-config", "value", "what is compiled is no choice; --enforce-eager switches CUDA graphs off"
    ),
    _no_effect("--enable-server-load-tracking", "flag", "the load is always in /metrics"),
    _no_effect("--multi-step-stream-outputs", "flag", "a stream always carries every token"),
    _no_effect("--disable-mm-preprocessor-cache", "flag", _IMAGES),
    _no_effect("--collect-detailed-traces", "values", "traces always have all spans; see --otlp-traces-endpoint"),
    _no_effect("--scheduling-policy", "value", "a request's 'priority' counts always, then the order of arrival"),
    # devices and machines
    _not_here("--data-parallel-size -dp", "value", _ENGINES, ("1",)),
    _not_here("--enable-expert-parallel", "flag", _EXPERTS),
    _not_here("--kv-transfer-config", "value", _ROLES, _NONE),
    _not_here("--worker-cls --scheduler-cls", "value", "parts of the engine cannot be replaced", ("auto", *_NONE)),
    # weights
    _not_here("--quantization-param-path", "value", "KV scales are the checkpoint's (--kv-cache-dtype)", _NONE),
    _not_here("--calculate-kv-scales", "flag", "KV scales are the checkpoint's (--kv-cache-dtype)"),
    _not_here("--rope-scaling --rope-theta", "value", _SHAPE, _NONE),
    _not_here("--override-neuron-config", "value", "there is no backend for such devices", _NONE),
    _not_here("--runner", "value", _TASKS, ("auto", "generate", "pooling")),
    _not_here("--convert", "value", _TASKS, ("auto", "none", "embed", "classify")),
    _not_here("--override-pooler-config", "value", "a request says how its vectors are pooled ('pooling')", _NONE),
    _not_here("--code-revision", "value", "code comes with the model: at the same --revision", _NONE),
    _not_here("--config-format", "value", "models are read in Hugging Face layout alone", ("auto", "hf")),
    _not_here(
        "--disable-sliding-window",
        "flag",
        "attention is computed as config.json says; use --hf-overrides '{\"sliding_window\": null}'",
    ),
    _not_here("--generation-config", "value", "requests say how tokens are drawn", ("vllm", *_NONE)),
    _not_here("--override-generation-config", "value", "requests say how tokens are drawn", ("{}", *_NONE)),
    # adapters
    _not_here("--enable-lora-bias", "flag", _ADAPTERS),
    _not_here("--long-lora-scaling-factors", "value", "the scale of an adapter is that of its configuration", _NONE),
    _not_here("--qlora-adapter-name-or-path", "value", _ADAPTERS, _NONE),
    # images, grammars, tools
    _not_here("--image-input-type --image-token-id --image-input-shape --image-feature-size", "value", _IMAGES),
    _not_here("--image-processor --image-processor-revision", "value", _IMAGES, _NONE),
    _not_here("--allowed-local-media-path", "value", _LOCAL, _NONE),
    _not_here("--disable-image-processor", "flag", _IMAGES),
    _not_here("--logits-processor-pattern", "value", "requests cannot bring code", _NONE),
    _not_here("--tool-parser-plugin", "value", "the formats of tool calls are those of --tool-call-parser", _NONE),
    # speculation
    _not_here("--speculative-model", "value", _DRAFTS, _NONE),
    replace(_not_here("--speculative-config", "value", _METHODS, _NONE), reads=speculation_settings),
    _not_here("--speculative-model-quantization --speculative-max-model-len", "value", _DRAFTS, _NONE),
    _not_here("--speculative-draft-tensor-parallel-size -spec-draft-tp", "value", _DRAFTS, _NONE),
    _not_here("--speculative-disable-by-batch-size", "value", _DRAFTS, _NONE),
    _not_here("--speculative-disable-mqa-scorer --disable-logprobs-during-spec-decoding", "flag", _DRAFTS),
    _not_here("--ngram-prompt-lookup-max --ngram-prompt-lookup-min", "value", _DRAFTS, _NONE),
    _not_here(
        "--spec-decoding-acceptance-method",
        "value",
        "a drafted token is accepted only where the model would have drawn it",
        ("rejection_sampler",),
    ),
    _not_here(
        "--typical-acceptance-sampler-posterior-threshold --typical-acceptance-sampler-posterior-alpha",
        "value",
        "a drafted token is accepted only where the model would have drawn it",
        _NONE,
    ),
    # HTTP
    _not_here("--disable-fastapi-docs", "flag", "/docs and /openapi.json stay, behind the keys where there are some"),
    _not_here("--response-role", "value", "answers have the role 'assistant'", ("assistant",)),
    _not_here("--chat-template-content-format", "value", "content parts are joined to one text", ("auto", "string")),
    _not_here("--uds", "value", "the server listens on a port; put a proxy with the socket in front of it", _NONE),
    _not_here(
        "--enable-tokenizer-info-endpoint",
        "flag",
        "the tokenizer's files are those of the model; /tokenize and /detokenize have its ids and pieces",
    ),
    _not_here(
        "--enable-per-request-metrics", "flag", "the field 'timings' of a request puts its times into the answer"
    ),
    _not_here("--watermark-config", "value", "outputs have no watermark", _NONE),
    _no_effect("--show-hidden-metrics-for-version", "value", "no metric is hidden"),
    _no_effect("--structured-outputs-config.backend", "value", _GRAMMARS),
    _not_here("--chat-template-text-format", "value", "content parts are joined to one text", ("string",)),
    _not_here("--enable-sleep-mode", "flag", "an engine keeps its memory until it is stopped"),
    _not_here("--middleware", "values", "put a proxy in front of the server"),
    _not_here("--config", "value", "there is no file of settings; give them as flags or variables"),
    _not_here("--ssl-ca-certs", "value", _CLIENTS, _NONE),
    _not_here("--ssl-cert-reqs", "value", _CLIENTS, ("0",)),
)


@dataclass(frozen=True, slots=True)
class Variable:
    """An environment variable of another server. `asks_nothing`: see `Other`."""

    name: str
    because: str
    asks_nothing: tuple[str, ...] = ()
    refused: bool = True


_INSTANCE = (
    "is not supported here: it is for prefill and decode instances, which `antiphon start-role` (start_servers.sh) "
    "starts; use that, or unset it"
)

VARIABLES: tuple[Variable, ...] = (
    Variable("GLOBAL_RANK_TABLE_FILE_PATH", _INSTANCE),
    Variable("RANK_TABLE_FILE_PATH", _INSTANCE),
    Variable("NODE_PORTS", _INSTANCE),
    Variable(
        "LLM_TOOLS_PATH", "has no effect here: it is read by `antiphon start-role` (start_servers.sh)", refused=False
    ),
)
BY_NAME: Mapping[str, Other] = {name: other for other in OPTIONS for name in other.names}


@dataclass(frozen=True, slots=True)
class Taken:
    """A command line without the listed options.

    `told` maps each accepted option, with its values, to its notice; `refused` maps each refused option to the reason.
    """

    words: list[str]
    told: dict[str, str]
    refused: dict[str, str]

    def notices(self) -> list[str]:
        """Returns a notice for each accepted option. Raises SettingsError that names all refused options."""
        if self.refused:
            raise SettingsError("\n  ".join(f"{name} {because}" for name, because in self.refused.items()))
        return [f"{name} {because}" for name, because in self.told.items()]


def take(words: Sequence[str], environ: Mapping[str, str]) -> Taken:
    """Removes the listed options from a command line and reads the listed variables.

    Option names must be spelled with dashes (`normalise`).
    """
    taken = Taken([], {}, {})
    index = 0
    while index < len(words):
        name, other, values = _read(words[index])
        index += 1
        if other is None:
            taken.words.append(words[index - 1])
            continue
        if values is None:
            values = _values(other, words[index:])
            index += len(values)
        if not values and other.takes != "flag":
            taken.refused[name] = "needs a value"
        elif values and all(value.lower() in other.asks_nothing for value in values):
            continue
        elif other.instead:
            taken.words.append(other.instead)
        elif read := other.settings(values):
            taken.words.extend(f"--{name.replace('_', '-')}={json.dumps(value)}" for name, value in read.items())
        else:
            (taken.refused if other.refused else taken.told)[" ".join((name, *values))] = other.because
    for variable, value in _variables(environ):
        (taken.refused if variable.refused else taken.told)[f"{variable.name}={value}"] = variable.because
    return taken


def _read(word: str) -> tuple[str, Other | None, list[str] | None]:
    """Returns an option's name, its entry in the table, and its value if that is part of the word (`--name=…`)."""
    name, equals, value = word.partition("=")
    positive = BY_NAME.get(f"--{name.removeprefix('--no-')}") if name.startswith("--no-") else None
    if positive is not None and positive.takes == "flag":
        return name, positive, ["false"]
    return name, BY_NAME.get(name), [value] if equals else None


def _values(other: Other, following: Sequence[str]) -> list[str]:
    """Returns the words after an option that are its values."""
    if other.takes == "flag":
        return [word for word in following[:1] if word.lower() in (*_TRUE, *_FALSE)]
    values = list[str]()
    for word in following if other.takes == "values" else following[:1]:
        if word.startswith("-") and not word[1:].isdigit():
            break
        values.append(word)
    return values


def _variables(environ: Mapping[str, str]) -> Iterator[tuple[Variable, str]]:
    """Yields each listed variable whose value has an effect, with the value."""
    for variable in VARIABLES:
        value = environ.get(variable.name, "")
        if value and value.lower() not in variable.asks_nothing:
            yield variable, value
