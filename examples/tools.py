"""A function that the model calls, and its result in the answer, with the OpenAI client.

The model has to call the function (`tool_choice`). With "auto" it decides by itself.
"""

import json
import os

from openai import OpenAI

BASE_URL = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1")
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def get_weather(city: str) -> str:
    """Returns the weather, which is always the same here."""
    return f"It is sunny in {city}."


def main() -> None:
    """Asks a question, runs the function that the model calls, and asks for the answer with the result."""
    client = OpenAI(base_url=BASE_URL, api_key=os.environ.get("OPENAI_API_KEY", "none"))
    model = client.models.list().data[0].id
    messages = [{"role": "user", "content": "What is the weather in Rome?"}]
    asked = {"model": model, "tools": [WEATHER], "temperature": 0, "max_tokens": 128}
    message = client.chat.completions.create(messages=messages, tool_choice="required", **asked).choices[0].message
    messages.append(message.to_dict())
    for call in message.tool_calls or []:
        result = get_weather(**json.loads(call.function.arguments))
        print(f"{call.function.name}({call.function.arguments}) -> {result}")
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    answer = client.chat.completions.create(messages=messages, tool_choice="none", **asked)
    print(f"Assistant: {answer.choices[0].message.content}")


if __name__ == "__main__":
    main()
