"""A completion with the log probabilities of its tokens and of the likeliest alternatives."""

import math
import os

from openai import OpenAI

BASE_URL = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1")


def main() -> None:
    """Prints one line for each token: its text, its probability, and what the model could have said instead."""
    client = OpenAI(base_url=BASE_URL, api_key=os.environ.get("OPENAI_API_KEY", "none"))
    model = client.models.list().data[0].id
    completion = client.completions.create(
        model=model, prompt="Once upon a time", max_tokens=12, temperature=0, logprobs=3
    )
    choice = completion.choices[0]
    print(f"Once upon a time{choice.text}")
    logprobs = choice.logprobs
    for token, logprob, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        others = ", ".join(f"{text!r} {math.exp(value):.2f}" for text, value in top.items() if text != token)
        print(f"{token!r:>12} {math.exp(logprob):.2f}   instead of {others}")


if __name__ == "__main__":
    main()
