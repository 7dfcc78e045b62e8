"""Structured output: `constraint` compiles grammars, `tagged_lark` writes tagged text as a grammar.

This file imports nothing, so that a process loads only the modules that it uses.
"""
