"""Reads the `options` of a request: sampling parameters with llama.cpp's names. Pure.

Options that set how Ollama loads or computes a model have no effect here. Options whose value would change the answer
are either supported or refused.
"""

from typing import Any

import msgspec

from services.gateway.openai.bodies import unsupported_params
from services.gateway.openai.bodies.parameter_names import in_names
from services.gateway.openai.bodies.unsupported_params import FieldRules, Unsupported
from services.gateway.openai.body import read_body, read_fields
from shared.errors import ServiceError
from shared.request.checks import refuse

_RANDOM_SEED = -1
_ALL_TOKENS = 0


class Options(msgspec.Struct, kw_only=True):
    """The options that have an effect. None means the server's default, which is not Ollama's."""

    num_predict: int | None = None
    """Number of output tokens at most; negative: as many as fit."""
    num_ctx: int | None = None
    """Context length that the request needs; must not exceed the model's. The model's own context length always
    applies.
    """
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None


_DECODER = msgspec.json.Decoder(Options)
_RULES = FieldRules(
    no_effect=frozenset(
        {
            # how Ollama loads and computes a model
            "num_batch",
            "num_gpu",
            "main_gpu",
            "num_thread",
            "num_gqa",
            "numa",
            "low_vram",
            "use_mmap",
            "use_mlock",
            "f16_kv",
            "logits_all",
            "vocab_only",
            # which tokens to keep when the context overflows; here it never overflows
            "num_keep",
            # these belong to Mirostat, which is refused
            "mirostat_eta",
            "mirostat_tau",
        }
    ),
    unsupported={
        "mirostat": Unsupported((None, 0)),
        "tfs_z": Unsupported((None, 1)),
        "typical_p": Unsupported((None, 1)),
        "repeat_last_n": Unsupported((None, -1), "The penalty is for all tokens, which is -1."),
        "penalize_newline": Unsupported((None, True)),
    },
    elsewhere={"max_tokens": "Send it as 'num_predict'.", "repetition_penalty": "Send it as 'repeat_penalty'."},
)
NAMES = {
    "max_tokens": "options.num_predict",
    "repetition_penalty": "options.repeat_penalty",
    **{
        name: f"options.{name}"
        for name in ("temperature", "top_k", "top_p", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty")
    },
}
"""The names of options by OpenAI's names of the parameters."""


def read(given: dict[str, Any] | None, max_model_len: int) -> Options:
    """Returns the options of a request. Raises ServiceError that names the invalid option."""
    data = msgspec.json.encode(given or {})
    try:
        unsupported_params.check(read_fields(data), Options, rules=_RULES)
        options = read_body(data, _DECODER)
    except ServiceError as error:
        param = error.param
        raise in_names(error, {param: f"options.{param}"} if param else {"": "options"}) from None
    if options.num_ctx is not None and options.num_ctx > max_model_len:
        refuse("options.num_ctx", f"must not exceed the model's context length of {max_model_len} tokens")
    return options


def sampling_fields(options: Options) -> dict[str, Any]:
    """Returns the options as fields of a chat or completion body."""
    limit, seed, top_k = options.num_predict, options.seed, options.top_k
    return {
        "max_tokens": None if limit is not None and limit < 0 else limit,
        "temperature": options.temperature,
        "top_k": -1 if top_k == _ALL_TOKENS else top_k,
        "top_p": options.top_p,
        "min_p": options.min_p,
        "seed": None if seed == _RANDOM_SEED else seed,
        "stop": options.stop,
        "repetition_penalty": options.repeat_penalty,
        "presence_penalty": options.presence_penalty,
        "frequency_penalty": options.frequency_penalty,
    }
