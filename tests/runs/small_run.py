"""The model and the data of small runs, as TOML. It imports nothing, because environments without a package use it."""

MODEL_AND_DATA = """
[model]
name = "gpt2"
random = true
config = { n_embd = 16, n_layer = 2, n_head = 2 }
[data]
train = "text.txt"
sequence_length = 16
batch_size = 4
"""
