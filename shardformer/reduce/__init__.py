"""How gradients are agreed on between ranks."""
