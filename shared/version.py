"""The version of this software. No other file states it.

The build backend, the command line, `GET /version`, service discovery and traces read it from here.
"""

__version__ = "0.2.0"
