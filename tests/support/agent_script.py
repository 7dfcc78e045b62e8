"""What a model says that works as a coding agent: it reads the file that it is asked for, and says what is in it.

A script, for tests of requests that need a whole turn and no model. It reads prompts in the demo model's chat format.
"""

import json
import re
import shutil
from pathlib import Path
from typing import Any

from antiphon.shared.models.model_files import DEMO_DIRECTORY

CONTENT = "The kettle is blue."
"""What is in the file that agents are asked to read."""
SUM, SAYS_SUM = "What is 2 + 3?", "2 + 3 = 5."
END = "<|im_end|>"
_MESSAGE = re.compile(r"<\|im_start\|>(\w+)\n(.*?)(?=<\|im_end\|>|\Z)", re.DOTALL)
_TOOLS = re.compile(r"<tools>\n(.*?)\n</tools>", re.DOTALL)
_FILE = re.compile(r"Read the file (\S+)")
_RESULT = re.compile(r"<tool_response>\n(.*?)\n</tool_response>", re.DOTALL)
_READERS = ("read", "read_file", "exec_command")
"""Names of the tools that read a file, in lower case."""
_PATHS, _COMMAND = ("file_path", "filePath"), "cmd"


def long_model(directory: Path, context: int) -> Path:
    """Makes a model directory with the demo model's tokenizer and template and another context; returns it.

    Its weights are not meant to be computed with.
    """
    model = Path(shutil.copytree(DEMO_DIRECTORY, directory / "long"))
    for name, field in (("config.json", "max_position_embeddings"), ("tokenizer_config.json", "model_max_length")):
        told = json.loads((model / name).read_text())
        (model / name).write_text(json.dumps({**told, field: context}))
    return model


def question(path: str) -> str:
    """Returns what an agent is asked to do with the file."""
    return f"Read the file {path} and tell me what it says."


def say(prompt: str) -> str:
    """Returns what the model says after a prompt."""
    asked = [text for role, text in _MESSAGE.findall(prompt) if role == "user"]
    last = asked[-1] if asked else ""
    if _RESULT.search(last):
        return f"The file says: {CONTENT}" if CONTENT in last else "The file says something else."
    wanted, tools = _FILE.search(last), _TOOLS.search(prompt)
    if wanted is not None and tools is not None:
        return call([json.loads(line)["function"] for line in tools[1].splitlines()], wanted[1])
    return SAYS_SUM if SUM in last else "A file is read."


def call(functions: list[dict[str, Any]], path: str) -> str:
    """Returns the call of the function that reads a file, with the argument that it has."""
    function = next(one for one in functions if one["name"].lower() in _READERS)
    known = function["parameters"]["properties"]
    named = next((name for name in _PATHS if name in known), None)
    arguments = {_COMMAND: f"cat {path}"} if named is None else {named: path}
    said = json.dumps({"name": function["name"], "arguments": arguments})
    return f"<tool_call>\n{said}\n</tool_call>"
