"""OpenAI's `/v1/conversations`: lists of items that responses continue and append to (their field `conversation`).

| module          | what it does                                                             |
|-----------------|--------------------------------------------------------------------------|
| `endpoints`     | creates, retrieves, changes and deletes conversations and their items    |
| `schemas`       | the bodies of requests                                                   |
| `conversations` | finds the conversations of an API key, and changes them one at a time    |
| `record`        | one conversation, and the turns that a model is given                    |
| `store`         | keeps conversations where finished responses are                         |
"""
