"""The demo: one small language model trained twice on the same text, whole in one process and split over several."""
