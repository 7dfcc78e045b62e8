"""A batch: a file of requests that the server answers when it has time, and the file of their answers."""

import json
import os
import time

from openai import OpenAI

BASE_URL = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1")
URL = "/v1/chat/completions"


def main() -> None:
    """Prints the state of the batch until it ends, then the answer to each question."""
    client = OpenAI(base_url=BASE_URL, api_key=os.environ.get("OPENAI_API_KEY", "none"))
    questions = {f"{number} + {number}": f"What is {number} + {number}?" for number in range(8)}
    lines = [json.dumps(request(name, question)) for name, question in questions.items()]
    file = client.files.create(file=("questions.jsonl", "\n".join(lines).encode()), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=URL, completion_window="24h")
    while batch.status not in ("completed", "failed", "expired", "cancelled"):
        print(batch.status)
        time.sleep(0.5)
        batch = client.batches.retrieve(batch.id)
    print(f"{batch.status}: {batch.request_counts.completed} of {batch.request_counts.total} requests")
    answers = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
    for answer in sorted(answers, key=lambda one: one["custom_id"]):
        print(f"{answer['custom_id']}: {answer['response']['body']['choices'][0]['message']['content']}")


def request(name: str, question: str) -> dict:
    """Returns one line of the input file."""
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": 32, "temperature": 0}
    return {"custom_id": name, "method": "POST", "url": URL, "body": body}


if __name__ == "__main__":
    main()
