"""OpenAI's client for Python: what the server keeps besides responses: conversations, files, batches, uploads."""

import json
import time

import openai
from openai import OpenAI
from openai.types import Batch

from tests.clients.checks import ANSWER, ASK, KEY, MODEL, QUESTION, URL, check, raised, refused

client = OpenAI(base_url=URL, api_key=KEY, max_retries=0)
conversations, files, batches = client.conversations, client.files, client.batches
SAID = {"type": "message", "role": "user", "content": ASK}
ENDED = ("completed", "failed", "expired", "cancelled")


def started(endpoint: str, body: dict, **fields: dict) -> Batch:
    line = {"custom_id": "a", "method": "POST", "url": endpoint, "body": {"model": MODEL, **body}}
    file = files.create(file=("in.jsonl", json.dumps(line).encode()), purpose="batch")
    return batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", **fields)


def answer_of(batch: Batch) -> dict:
    """Returns the body of the batch's one answer, when it has ended."""
    while (batch := batches.retrieve(batch.id)).status not in ENDED:
        time.sleep(0.05)
    assert batch.status == "completed", batch
    return json.loads(files.content(batch.output_file_id).text)["response"]["body"]


@check
def a_conversation_is_made_changed_and_deleted():
    made = conversations.create(metadata={"a": "b"})
    assert conversations.retrieve(made.id).metadata == {"a": "b"}
    assert conversations.update(made.id, metadata={"a": "c"}).metadata == {"a": "c"}
    assert conversations.delete(made.id).deleted
    raised(openai.NotFoundError, lambda: conversations.retrieve(made.id))


@check
def a_response_reads_and_extends_a_conversation():
    made = conversations.create(items=[SAID])
    asked = {"model": MODEL, "input": ASK, "temperature": 0, "conversation": made.id}
    assert client.responses.create(**asked).conversation.id == made.id
    roles = [item.role for item in conversations.items.list(made.id, order="asc")]
    assert roles == ["user", "user", "assistant"]


@check
def the_items_of_a_conversation_are_made_shown_and_deleted():
    made = conversations.create()
    [item] = conversations.items.create(made.id, items=[SAID]).data
    assert conversations.items.retrieve(item.id, conversation_id=made.id).content[0].text == ASK
    conversations.items.delete(item.id, conversation_id=made.id)
    assert not [*conversations.items.list(made.id)]


@check
def a_file_is_kept_and_deleted():
    made = files.create(file=("in.jsonl", b"{}\n"), purpose="batch")
    assert files.wait_for_processing(made.id, poll_interval=0.1).status == "processed"
    assert (files.retrieve(made.id).filename, files.content(made.id).read()) == ("in.jsonl", b"{}\n")
    assert made.id in [one.id for one in files.list(purpose="batch")]
    assert files.delete(made.id).deleted
    raised(openai.NotFoundError, lambda: files.retrieve(made.id))


@check
def a_file_expires():
    after = {"anchor": "created_at", "seconds": 3600}
    made = files.create(file=("in.jsonl", b"{}\n"), purpose="batch", expires_after=after)
    assert made.expires_at == made.created_at + 3600


@refused("other purposes of files", "'batch', 'vision', 'user_data'")
def a_file_for_another_purpose_is_kept():
    files.create(file=("a.jsonl", b"{}\n"), purpose="fine-tune")


@check
def a_batch_of_chats_is_answered():
    batch = started("/v1/chat/completions", {"messages": QUESTION, "temperature": 0}, metadata={"a": "b"})
    assert batch.metadata == {"a": "b"}
    assert answer_of(batch)["choices"][0]["message"]["content"] == ANSWER
    assert batches.retrieve(batch.id).request_counts.completed == 1


@check
def a_batch_of_completions_is_answered():
    assert answer_of(started("/v1/completions", {"prompt": ASK, "max_tokens": 3}))["usage"]["completion_tokens"] == 3


@check
def a_batch_of_responses_is_answered():
    assert answer_of(started("/v1/responses", {"input": ASK, "temperature": 0}))["status"] == "completed"


@check
def a_batch_of_embeddings_is_answered():
    assert len(answer_of(started("/v1/embeddings", {"input": ["one", "two"]}))["data"]) == 2


@check
def batches_are_listed():
    made = started("/v1/embeddings", {"input": "one"})
    assert made.id in [one.id for one in batches.list(limit=2)]
    answer_of(made)


@check
def a_batch_is_cancelled():
    made = started("/v1/chat/completions", {"messages": QUESTION, "max_tokens": 1500, "ignore_eos": True})
    assert batches.cancel(made.id).status in ("cancelling", "cancelled")


@check
def a_wrong_line_fails_its_batch():
    file = files.create(file=("in.jsonl", b"[]\n"), purpose="batch")
    made = batches.create(input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h")
    while (made := batches.retrieve(made.id)).status not in ENDED:
        time.sleep(0.05)
    assert (made.status, made.errors.data[0].line) == ("failed", 1)


@refused("`/v1/uploads`", "Unknown request URL")
def a_file_is_uploaded_in_parts():
    client.uploads.create(filename="in.jsonl", bytes=3, mime_type="application/jsonl", purpose="batch")


@refused("`/v1/uploads`", "Unknown request URL")
def a_chunked_upload_is_made():
    client.uploads.upload_file_chunked(
        file=b"{}\n", filename="in.jsonl", bytes=3, mime_type="application/jsonl", purpose="batch"
    )


@refused("`/v1/vector_stores`", "Unknown request URL")
def a_vector_store_is_made():
    client.vector_stores.create(name="a")
