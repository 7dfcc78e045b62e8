"""Commands for operators of a running server. Each asks a gateway over HTTP, as the console does.

commands   the flags of the commands
models     `antiphon models`: versions of the models
replay     `antiphon replay`, `fork` and `record save`: recorded requests that run again
engines    `antiphon drain`, `move` and `resume`: an engine out of service and back
"""
