"""`antiphon chaos`: kills and freezes the processes of a server by a seeded schedule, while streams are compared.

`schedule` decides which fault happens when (pure); `targets` applies and verifies it on processes;
`streams` asks the server and compares; `report` counts and prints; `command` connects them.
"""
