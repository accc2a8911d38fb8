"""Checkpoints that are saved under one layout of processes and loaded under any other."""
