"""A conversation of two turns with the OpenAI client."""

import os

from openai import OpenAI

BASE_URL = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1")
QUESTIONS = ("What is 12 + 7?", "And what is the capital of France?")


def main() -> None:
    """Asks each question with the conversation so far and prints the answers."""
    client = OpenAI(base_url=BASE_URL, api_key=os.environ.get("OPENAI_API_KEY", "none"))
    model = client.models.list().data[0].id
    messages = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        completion = client.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=64)
        answer = completion.choices[0].message.content or ""
        messages.append({"role": "assistant", "content": answer})
        usage = completion.usage
        print(f"User: {question}\nAssistant: {answer}")
        print(f"  ({usage.prompt_tokens} prompt tokens, {usage.completion_tokens} completion tokens)")


if __name__ == "__main__":
    main()
