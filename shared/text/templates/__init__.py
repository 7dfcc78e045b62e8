"""Converts a conversation to the text of a prompt. Pure.

| module                   | what it does                                                                |
|--------------------------|-----------------------------------------------------------------------------|
| `chat_template`          | renders a model's chat template in a sandbox                                |
| `conversation_templates` | layouts by name, for tokenizers without a chat template; the `.jinja` files |
| `template_formats`       | recognises the formats of tool calls and reasoning from a template          |
| `turns`                  | chat turns as texts, for the chat template                                  |
"""
