"""What autograd saves in the forward for the backward: who keeps it, where, and how it comes back.

Also here, each to be said in one text by hand:

- What ZeRO keeps elsewhere than on the device: in the memory of the host, or in files.
"""

from __future__ import annotations
