"""The versions that users have: what is tested with which Python, torch and transformers, see ``__main__``."""
