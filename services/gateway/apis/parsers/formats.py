"""The formats of tool calls, by the names of the setting `--tool-call-parser`.

Tokenizers announce the same names when they recognise a model's chat template
(`antiphon.shared.text.templates.template_formats`).
"""

from dataclasses import dataclass

from antiphon.services.gateway.apis.parsers.gemma import Gemma4Parser
from antiphon.services.gateway.apis.parsers.grammars import gemma_calls, json_calls, python_calls, tagged_calls
from antiphon.services.gateway.apis.parsers.grammars.pieces import CallGrammar, OnlyCalls
from antiphon.services.gateway.apis.parsers.harmony import GptOssParser
from antiphon.services.gateway.apis.parsers.json_formats import (
    DeepseekV3Parser,
    HermesParser,
    HunyuanParser,
    KimiK2Parser,
    Llama3JsonParser,
    MistralParser,
    NemotronParser,
)
from antiphon.services.gateway.apis.parsers.pythonic import Lfm2Parser, PythonicParser
from antiphon.services.gateway.apis.parsers.tagged_arguments import (
    DeepseekV32Parser,
    Glm45Parser,
    MinimaxM2Parser,
    Qwen3CoderParser,
    SeedOssParser,
)
from antiphon.services.gateway.apis.parsers.tool_parser import ToolParser
from antiphon.shared.settings.output_formats import TOOL_ALIASES
from antiphon.shared.text import channels

DEFAULT_ID_PATTERN = "call_{digest:.24}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """A format of tool calls: its parser, and the grammar that constrains calls to the tools' schemas.

    `special_tokens`: tokens of the format that are special tokens of some tokenizers; the text must have them though
    special tokens are skipped. `id_pattern`: the form of a call's id. `digest` stands for hexadecimal digits, `name`
    for the function, `number` for the number of calls in the conversation before it; some chat templates accept only
    ids of nine letters and digits, others write the ids as the model writes them. `only_calls`: the grammar of forced
    calls; None: forced calls are not written in this format.
    """

    parser: type[ToolParser]
    grammar: CallGrammar
    special_tokens: tuple[str, ...] = ()
    id_pattern: str = DEFAULT_ID_PATTERN
    only_calls: OnlyCalls | None = None


_FORMATS: dict[str, ToolFormat] = {
    "hermes": ToolFormat(
        parser=HermesParser,
        grammar=json_calls.hermes,
        special_tokens=("<tool_call>", "</tool_call>"),
        only_calls=json_calls.only_hermes,
    ),
    "qwen3_coder": ToolFormat(
        parser=Qwen3CoderParser, grammar=tagged_calls.qwen3_coder, special_tokens=("<tool_call>", "</tool_call>")
    ),
    "llama3_json": ToolFormat(
        parser=Llama3JsonParser,
        grammar=json_calls.llama3_json,
        special_tokens=("<|python_tag|>",),
        only_calls=json_calls.only_llama3_json,
    ),
    "mistral": ToolFormat(
        parser=MistralParser,
        grammar=json_calls.mistral,
        special_tokens=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
        id_pattern="{digest:.9}",
        only_calls=json_calls.only_mistral,
    ),
    "deepseek_v3": ToolFormat(
        parser=DeepseekV3Parser,
        grammar=json_calls.deepseek_v3,
        special_tokens=(
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁sep｜>",
        ),
        only_calls=json_calls.only_deepseek_v3,
    ),
    "glm45": ToolFormat(
        parser=Glm45Parser,
        grammar=tagged_calls.glm45,
        special_tokens=("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    "pythonic": ToolFormat(
        parser=PythonicParser, grammar=python_calls.pythonic, special_tokens=("<|python_start|>", "<|python_end|>")
    ),
    "gpt_oss": ToolFormat(
        parser=GptOssParser,
        grammar=json_calls.gpt_oss,
        special_tokens=channels.SPECIAL_TOKENS,
        only_calls=json_calls.only_gpt_oss,
    ),
    "kimi_k2": ToolFormat(
        parser=KimiK2Parser,
        grammar=json_calls.kimi_k2,
        special_tokens=(
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            "<|tool_call_begin|>",
            "<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
        ),
        id_pattern="functions.{name}:{number}",
        only_calls=json_calls.only_kimi_k2,
    ),
    "minimax_m2": ToolFormat(
        parser=MinimaxM2Parser,
        grammar=tagged_calls.minimax_m2,
        special_tokens=("<minimax:tool_call>", "</minimax:tool_call>"),
    ),
    "seed_oss": ToolFormat(
        parser=SeedOssParser,
        grammar=tagged_calls.seed_oss,
        special_tokens=("<seed:tool_call>", "</seed:tool_call>"),
    ),
    "lfm2": ToolFormat(
        parser=Lfm2Parser, grammar=python_calls.lfm2, special_tokens=("<|tool_call_start|>", "<|tool_call_end|>")
    ),
    "deepseek_v32": ToolFormat(
        parser=DeepseekV32Parser, grammar=tagged_calls.deepseek_v32, special_tokens=("｜DSML｜",)
    ),
    "gemma4": ToolFormat(
        parser=Gemma4Parser, grammar=gemma_calls.gemma4, special_tokens=("<|tool_call>", "<tool_call|>", '<|"|>')
    ),
    "nemotron": ToolFormat(
        parser=NemotronParser,
        grammar=json_calls.NEMOTRON.grammar,
        special_tokens=("<TOOLCALL>", "</TOOLCALL>"),
        only_calls=json_calls.NEMOTRON.only_calls,
    ),
    "hunyuan": ToolFormat(
        parser=HunyuanParser,
        grammar=json_calls.HUNYUAN.grammar,
        special_tokens=("<tool_calls>", "</tool_calls>"),
        only_calls=json_calls.HUNYUAN.only_calls,
    ),
}
TOOL_FORMATS = _FORMATS | {alias: _FORMATS[name] for alias, name in TOOL_ALIASES.items()}
