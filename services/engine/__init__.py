"""The engine service: pure core (`core`), step loop (`loop`), model (`worker`, `models`), shell (`actor`)."""
