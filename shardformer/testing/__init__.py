"""Small models, worker processes and ranks as threads: what tests, verify and inference run on."""

from __future__ import annotations
