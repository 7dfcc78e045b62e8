"""`antiphon chat`: a conversation in the terminal, or one question, with any server that has OpenAI's chat completions.

command       one question, or a conversation; which of them is meant
session       the loop of a conversation: asks, prints, survives errors and Ctrl-C
slash         the commands that begin with `/`
prompt        reads what the user types: line editing, history, several lines
conversation  the messages and settings, and the body of a request; pure
answers       the pieces of a streamed answer, and its figures
"""
