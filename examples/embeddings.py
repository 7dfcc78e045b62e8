"""Vectors of texts with the OpenAI client, and the text that is nearest to a question."""

import os

from openai import OpenAI

BASE_URL = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1")
TEXTS = ("Paris is the capital of France.", "12 + 7 = 19", "A cat sat on the mat.")
QUESTION = "What is the capital of France?"


def main() -> None:
    """Asks for all vectors at once and prints each text with its cosine to the question, the nearest first."""
    client = OpenAI(base_url=BASE_URL, api_key=os.environ.get("OPENAI_API_KEY", "none"))
    model = client.models.list().data[0].id
    answer = client.embeddings.create(model=model, input=[QUESTION, *TEXTS], extra_body={"pooling": "mean"})
    question, *vectors = [item.embedding for item in answer.data]
    # The vectors have length one, so their product is the cosine.
    cosines = [sum(a * b for a, b in zip(question, vector, strict=True)) for vector in vectors]
    print(f"{len(question)} dimensions, {answer.usage.prompt_tokens} tokens")
    for cosine, text in sorted(zip(cosines, TEXTS, strict=True), reverse=True):
        print(f"{cosine:.3f}  {text}")


if __name__ == "__main__":
    main()
