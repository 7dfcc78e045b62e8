"""Commands for operators of a running server. Each uses a gateway's HTTP API, as the console does.

commands   the flags of the commands; `antiphon drain`, `move` and `resume`: an engine out of service and back
models     `antiphon models`: versions of the models
replay     `antiphon replay`, `fork` and `record save`: repetition of recorded requests
"""
