"""Context parallelism: ring attention, Ulysses, and tensors that are sharded over the sequence."""
