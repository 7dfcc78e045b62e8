"""The names of the formats of tool calls and of reasoning, and the texts by which a chat template shows them.

A template contains both, because it writes the earlier calls and reasoning of a conversation in the same format. The
gateway has the parsers of the formats (`antiphon.services.gateway.apis.parsers.formats`).
"""

Marks = tuple[str, ...]

TOOL_MARKS: dict[str, tuple[Marks, ...]] = {
    "deepseek_v3": (("<｜tool▁call▁begin｜>",),),
    "mistral": (("[TOOL_CALLS]",),),
    "glm45": (("<tool_call>", "<arg_key>"),),
    "qwen3_coder": (("<tool_call>", "<function=", "<parameter="),),
    "hermes": (("<tool_call>",),),
    "llama3_json": (('{"name": function name, "parameters": dictionary',),),
    "pythonic": (("[func_name1(param",),),
    "gpt_oss": (("<|start|>", "<|channel|>", "<|message|>"),),
    "kimi_k2": (("<|tool_call_begin|>", "<|tool_call_argument_begin|>"),),
    "minimax_m2": (("<minimax:tool_call>", "<invoke name="),),
    "seed_oss": (("<seed:tool_call>", "<function="),),
    "lfm2": (("<|tool_call_start|>",), ("<|tool_list_start|>",), ("List of tools: [", "<|im_start|>")),
    "deepseek_v32": (("｜DSML｜", "function_calls>"),),
    "gemma4": (("<|tool_call>", "call:"),),
    "nemotron": (("<TOOLCALL>",),),
    "hunyuan": (("<tool_calls>[",),),
}
"""For each format of calls, sets of texts that a template must contain together; one of the sets is enough.

A set that includes another one is more specific.
"""
UNREAD_TOOL_MARKS: tuple[Marks, ...] = (
    ("<tool_call>", "]<]minimax[>["),  # MiniMax M3: a token before every tag, and tags named like the arguments
    ("<tool_call>", "<invoke name="),
)
"""Sets of texts of templates whose calls have a format that is not read, though it looks like one of these."""
REASONING_MARKS: dict[str, tuple[Marks, ...]] = {
    "qwen3": (("</think>",),),
    "mistral": (("[THINK]",),),
    "granite": (("Here is my thought process:", "Here is my response:"),),
    "gpt_oss": (("<|start|>", "<|channel|>", "<|message|>"),),
    "seed_oss": (("</seed:think>",),),
    "gemma4": (("<|channel>", "<channel|>"),),
    "hunyuan": (("</think>", "<answer>"), ("</think>", "<|extra_0|>")),
}
"""The same for reasoning."""
TOOL_ALIASES = {
    "qwen": "hermes",
    "glm": "glm45",
    "glm47": "glm45",
    "openai": "gpt_oss",
    "deepseek_v31": "deepseek_v3",
    "hunyuan_a13b": "hunyuan",
}
"""Further names of formats in the settings."""
REASONING_ALIASES = {"glm45": "qwen3", "openai_gptoss": "gpt_oss", "hunyuan_a13b": "hunyuan"}
NEVER_SHOWN = ("deepseek_r1",)
"""Formats of reasoning that no template shows."""
