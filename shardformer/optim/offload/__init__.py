"""What ZeRO keeps elsewhere than on the device: in the memory of the host, or in files."""
