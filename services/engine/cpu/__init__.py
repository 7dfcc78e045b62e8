"""The CPU backend: a decoder's whole step as one call into C++ (`source/`), compiled for the processor it runs on."""
