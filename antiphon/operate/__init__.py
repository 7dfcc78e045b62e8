"""Commands for operators. Each but those of `cached_models` uses a gateway's HTTP API, as the console does.

cached_models  `antiphon pull`, `list` and `rm`: the models on this disk
engines        `antiphon drain` and `resume`: an engine out of service and back
models         `antiphon models`: versions of the models
replay         `antiphon replay`, `fork` and `record save`: repetition of recorded requests
"""
