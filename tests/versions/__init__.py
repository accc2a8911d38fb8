"""Tests with different versions of Python, torch and transformers. See ``__main__``."""
