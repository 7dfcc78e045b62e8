"""The engine service: scheduler core (`core`), step loop (`loop`), model (`worker`, `models`), bus actor (`actor`)."""
