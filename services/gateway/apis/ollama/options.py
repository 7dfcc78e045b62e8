"""Reads the `options` of a request: sampling parameters with llama.cpp's names. Pure.

Options that set how Ollama loads or computes a model have no effect here, nor have those of samplers that only
llama.cpp has: the answer is a sample of the same model. Both are told.
"""

from typing import Any

import msgspec

from antiphon.services.gateway.apis.openai.bodies import request_fields
from antiphon.services.gateway.apis.openai.bodies.parameter_names import in_names
from antiphon.services.gateway.apis.openai.bodies.request_fields import FieldRules
from antiphon.services.gateway.apis.openai.body import SamplerFields
from antiphon.services.gateway.edge.access.call import ignore
from antiphon.services.gateway.edge.http.request_body import read_body, read_fields
from antiphon.shared.errors import ServiceError

_RANDOM_SEED = -1
_ALL_TOKENS = 0


class Options(SamplerFields, kw_only=True):
    """The options that have an effect. None means the server's default, which is not Ollama's."""

    num_predict: int | None = None
    """Number of output tokens at most; negative: as many as fit."""
    num_ctx: int | None = None
    """Context length that the request needs. The model's own context length always applies; a longer one is told."""
    stop: str | list[str] | None = None
    repeat_penalty: float | None = None


_DECODER = msgspec.json.Decoder(Options)
RULES = FieldRules(
    hints=frozenset(
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
            # samplers of llama.cpp
            "mirostat",
            "mirostat_eta",
            "mirostat_tau",
            "tfs_z",
            "typical_p",
            # which tokens a penalty is for: here for all
            "repeat_last_n",
            "penalize_newline",
        }
    ),
    elsewhere={"max_tokens": "Send it as 'num_predict'.", "repetition_penalty": "Send it as 'repeat_penalty'."},
)
NAMES = {
    "max_tokens": "options.num_predict",
    "repetition_penalty": "options.repeat_penalty",
    **{name: f"options.{name}" for name in (*SamplerFields.__struct_fields__, "stop")},
}
"""The names of options by OpenAI's names of the parameters."""


def read(given: dict[str, Any] | None, max_model_len: int) -> Options:
    """Returns the options of a request. Raises ServiceError that names the invalid option."""
    data = msgspec.json.encode(given or {})
    request_fields.check(read_fields(data), Options, RULES, within="options.")
    try:
        options = read_body(data, _DECODER)
    except ServiceError as error:
        raise in_names(error, {error.param: f"options.{error.param}"}) from None
    if options.num_ctx is not None and options.num_ctx > max_model_len:
        ignore("options.num_ctx")
    return options


def sampling_fields(options: Options) -> dict[str, Any]:
    """Returns the options as fields of a chat or completion body."""
    limit, seed = options.num_predict, options.seed
    return {
        **{name: getattr(options, name) for name in SamplerFields.__struct_fields__},
        "max_tokens": None if limit is not None and limit < 0 else limit,
        "top_k": -1 if options.top_k == _ALL_TOKENS else options.top_k,
        "seed": None if seed == _RANDOM_SEED else seed,
        "stop": options.stop,
        "repetition_penalty": options.repeat_penalty,
    }
