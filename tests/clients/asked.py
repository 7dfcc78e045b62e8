"""What the clients in Python ask for. Their scripts import it as a module beside themselves."""

from typing import Literal

from pydantic import BaseModel

QUESTION = [{"role": "user", "content": "What is 12 + 7?"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


class Answer(BaseModel):
    """What the model is asked for."""

    kind: bool
    mood: Literal["good", "bad"]
