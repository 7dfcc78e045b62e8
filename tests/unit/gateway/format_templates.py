"""Chat templates that write calls and reasoning as those of the models do, and nothing else that they do."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Written:
    """How a model's template writes an assistant's message. `tool`, `reasoning`: the formats that it shows.

    `prompt`: how the template begins the message. `several`: whether a message may have several calls.
    """

    tool: str
    reasoning: str = ""
    prompt: str = "<|im_start|>assistant\n"
    message: str
    end: str = "<|im_end|>"
    several: bool = True

    @property
    def template(self) -> str:
        return (
            "{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}"
            "{% if message.role == 'user' %}<|im_start|>user\n{{ message.content }}<|im_end|>\n"
            f"{{% else %}}{self.prompt}{self.message}{self.end}{{% endif %}}{{% endfor %}}"
            f"{{% if add_generation_prompt %}}{self.prompt}{{% endif %}}"
        )


_CALLS = "{% for call in message.tool_calls or [] %}{% set call = call.function %}"
_ITEMS = "{% for key, value in call.arguments | items %}"
_TEXT = "{{ value if value is string else value | tojson }}"
# As published: what is no text is written in Python's syntax, or at least True, False and None are.
_PYTHON = "{{ value | string }}"
_HALF_PYTHON = (
    "{{ value | tojson if value is mapping or (value is sequence and value is not string) else value | string }}"
)
_THINK = "{% if message.reasoning %}<think>\n{{ message.reasoning }}\n</think>\n\n{% endif %}{{ message.content }}"
_FUNCTION = "<function={{ call.name }}>\n"
_GEMMA_VALUE = (
    '{% macro shown(value) %}{% if value is string %}<|"|>{{ value }}<|"|>{% elif value is boolean %}'
    "{{ 'true' if value else 'false' }}{% elif value is mapping %}{ {%- for key, one in value | dictsort -%}"
    "{{ key }}:{{ shown(one) }}{{ ',' if not loop.last }}{% endfor %}}{% elif value is sequence %}"
    "[{% for one in value %}{{ shown(one) }}{{ ',' if not loop.last }}{% endfor %}]{% else %}{{ value }}"
    "{% endif %}{% endmacro %}"
)
_JSON_LIST = (
    "[{% for call in message.tool_calls %}{% set call = call.function %}"
    '{"name": "{{ call.name }}", "arguments": {{ call.arguments | tojson }}}{{ ", " if not loop.last }}{% endfor %}]'
)


def _listed(begin: str, end: str) -> str:
    return f"{{% if message.tool_calls %}}{begin}{_JSON_LIST}{end}{{% endif %}}"


TEMPLATES = {
    "gpt-oss": Written(
        tool="gpt_oss",
        reasoning="gpt_oss",
        prompt="<|start|>assistant",
        message="{% if message.thinking %}<|channel|>analysis<|message|>{{ message.thinking }}<|end|>"
        "<|start|>assistant{% endif %}{% if message.content %}<|channel|>commentary<|message|>{{ message.content }}"
        "<|end|><|start|>assistant{% endif %}" + _CALLS + " to=functions.{{ call.name }}"
        "<|channel|>commentary json<|message|>{{ call.arguments | tojson }}<|call|>{% endfor %}",
        end="",
        several=False,
    ),
    "Kimi K2 Thinking": Written(
        tool="kimi_k2",
        reasoning="qwen3",
        prompt="<|im_assistant|>assistant<|im_middle|>",
        message="<think>{{ message.reasoning }}</think>{{ message.content }}{% if message.tool_calls %}"
        "<|tool_calls_section_begin|>{% for call in message.tool_calls %}<|tool_call_begin|>{{ call.id }}"
        "<|tool_call_argument_begin|>{{ call.function.arguments | tojson }}<|tool_call_end|>{% endfor %}"
        "<|tool_calls_section_end|>{% endif %}",
    ),
    "MiniMax M2": Written(
        tool="minimax_m2",
        reasoning="qwen3",
        prompt="]~b]ai\n<think>\n",
        message="{{ message.reasoning }}\n</think>\n\n{{ message.content }}{% if message.tool_calls %}"
        "\n<minimax:tool_call>\n" + _CALLS + '<invoke name="{{ call.name }}">\n' + _ITEMS
        + '<parameter name="{{ key }}">' + _TEXT + "</parameter>\n{% endfor %}</invoke>\n{% endfor %}"
        "</minimax:tool_call>{% endif %}",
        end="[e~[\n",
    ),
    "Seed-OSS": Written(
        tool="seed_oss",
        reasoning="seed_oss",
        prompt="<seed:bos>assistant\n",
        message="{% if message.reasoning %}<seed:think>{{ message.reasoning }}</seed:think>{% endif %}\n"
        "{{ message.content }}\n" + _CALLS + "<seed:tool_call>\n" + _FUNCTION + _ITEMS + "<parameter={{ key }}>"
        + _PYTHON + "</parameter>\n{% endfor %}</function>\n</seed:tool_call>{% endfor %}",
        end="<seed:eos>",
    ),
    "GLM 4.7": Written(
        tool="glm45",
        reasoning="qwen3",
        prompt="<|assistant|><think>",
        message="{{ message.reasoning }}</think>{{ message.content }}" + _CALLS + "<tool_call>{{ call.name }}" + _ITEMS
        + "<arg_key>{{ key }}</arg_key><arg_value>" + _TEXT + "</arg_value>{% endfor %}</tool_call>{% endfor %}",
        end="",
    ),
    "LFM2.5": Written(
        tool="lfm2",
        reasoning="qwen3",
        message=_THINK + "{% if message.tool_calls %}<|tool_call_start|>[{% for call in message.tool_calls %}"
        "{% set call = call.function %}{{ call.name }}({% for key, value in call.arguments | items %}{{ key }}="
        "{% if value is string %}'{{ value }}'{% else %}{{ value }}{% endif %}{{ ', ' if not loop.last }}{% endfor %})"
        "{{ ', ' if not loop.last }}{% endfor %}]<|tool_call_end|>{% endif %}",
    ),
    "LFM2, calls in JSON": Written(
        tool="lfm2", message="{{ message.content }}" + _listed("<|tool_call_start|>", "<|tool_call_end|>")
    ),
    "DeepSeek V3.1": Written(
        tool="deepseek_v3",
        reasoning="qwen3",
        prompt="<｜Assistant｜><think>",
        message="{{ message.reasoning }}</think>{{ message.content }}{% if message.tool_calls %}<｜tool▁calls▁begin｜>"
        + _CALLS + "<｜tool▁call▁begin｜>{{ call.name }}<｜tool▁sep｜>{{ call.arguments | tojson }}<｜tool▁call▁end｜>"
        "{% endfor %}<｜tool▁calls▁end｜>{% endif %}",
        end="<｜end▁of▁sentence｜>",
    ),
    "DeepSeek V3.2": Written(
        tool="deepseek_v32",
        reasoning="qwen3",
        prompt="<｜Assistant｜><think>",
        message="{{ message.reasoning }}</think>{{ message.content }}{% if message.tool_calls %}"
        '\n\n<｜DSML｜function_calls>\n' + _CALLS + '<｜DSML｜invoke name="{{ call.name }}">\n' + _ITEMS
        + '<｜DSML｜parameter name="{{ key }}" string="{{ \'true\' if value is string else \'false\' }}">' + _TEXT
        + "</｜DSML｜parameter>\n{% endfor %}</｜DSML｜invoke>\n{% endfor %}</｜DSML｜function_calls>{% endif %}",
        end="<｜end▁of▁sentence｜>",
    ),
    "Gemma 4": Written(
        tool="gemma4",
        reasoning="gemma4",
        prompt="<|turn>model\n",
        message=_GEMMA_VALUE + "{% if message.reasoning %}<|channel>thought\n{{ message.reasoning }}\n<channel|>"
        "{% endif %}{{ message.content }}" + _CALLS + "<|tool_call>call:{{ call.name }}{ {%- "
        "for key, value in call.arguments | items -%}"
        "{{ key }}:{{ shown(value) }}{{ ',' if not loop.last }}{% endfor %}}<tool_call|>{% endfor %}",
        end="<turn|>\n",
    ),
    "Nemotron 3": Written(
        tool="qwen3_coder",
        reasoning="qwen3",
        prompt="<|im_start|>assistant\n<think>\n",
        message="{{ message.reasoning }}\n</think>\n{{ message.content }}" + _CALLS + "\n<tool_call>\n" + _FUNCTION
        + _ITEMS + "<parameter={{ key }}>\n" + _HALF_PYTHON + "\n</parameter>\n{% endfor %}</function>\n</tool_call>"
        "{% endfor %}",
    ),
    "Nemotron Nano 2": Written(
        tool="nemotron", reasoning="qwen3", message=_THINK + _listed("<TOOLCALL>", "</TOOLCALL>")
    ),
    "Hunyuan A13B": Written(
        tool="hunyuan",
        reasoning="hunyuan",
        prompt="<|extra_0|>",
        message="<think>\n{{ message.reasoning }}\n</think>\n<answer>\n{{ message.content }}\n</answer>\n"
        + _listed("<tool_calls>", "</tool_calls>"),
        end="<|eos|>",
    ),
}  # fmt: skip
