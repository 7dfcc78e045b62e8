"""`antiphon verify`: proves receipts by running the model (docs/guides/receipts.md).

`claims` takes receipts out of files and checks their signatures, `prompts` renders the request again, `checker` runs
the model, `verdict` judges what it found, `command` and `sampling` are what the command does with one and with many.
"""
