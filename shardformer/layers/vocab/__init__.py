"""Logits and losses over a vocabulary that is cut over ranks."""
