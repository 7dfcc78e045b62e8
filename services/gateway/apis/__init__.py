"""The APIs: the bodies, answers and errors of each, and the calls of tools in a model's output (`parsers`).

A folder with a module `api`, whose class `TheApi` extends `openai.base.Api`, is an API; nothing else names it.
"""
