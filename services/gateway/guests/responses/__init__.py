"""OpenAI's Responses API: `/v1/responses`. Responses are stored, can run in the background, and can be continued.

| module            | what it does                                                             |
|-------------------|--------------------------------------------------------------------------|
| `api`             | the routes, and the stores of what is kept                               |
| `endpoints`       | creates, retrieves, streams, cancels and deletes responses               |
| `schemas`         | the body of a request, and the fields that are refused or have no effect |
| `input_items`     | reads the input of a request: items, and the conversation that they form |
| `images`          | reads the images of the input                                            |
| `text_format`     | reads the format of the output text                                      |
| `convert`         | converts a body to the body of a chat request of `openai`                |
| `response_object` | the object that describes a response                                     |
| `encoder`         | encodes a response, whole or as events, with its output items            |
| `background`      | runs responses without a client in this gateway alone                    |
| `event_log`       | the events of one background response                                    |
| `stored/`         | finished responses                                                       |
| `conversations/`  | conversations, to which responses may belong                             |
| `socket/`         | the same API on a WebSocket, with one connection for many responses      |
"""
