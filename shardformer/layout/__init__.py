"""Plain values that say where numbers are: parameters, activations, gradients."""
