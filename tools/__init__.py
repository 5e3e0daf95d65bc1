"""Burnish: what happens to a language-model checkpoint after the optimizer has written it."""

__version__ = "0.1.0"
