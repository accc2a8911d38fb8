"""Stage 3 of ZeRO: parameters that are gathered where they are read."""
