"""What all commands share at the terminal.

exit_codes  the exit codes, and the exceptions that end a command with one of them
output      one answer as text or as JSON, colour, status lines
address     the address of the server and the API key: flags and environment variables
"""
