"""What autograd saves in the forward for the backward: who keeps it, where, and how it comes back."""
