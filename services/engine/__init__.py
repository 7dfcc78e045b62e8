"""The engine service: scheduler core (`core`), step loop (`steps`), model (`worker`, `models`), bus actor (`actor`)."""
