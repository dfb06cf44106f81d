"""What one rank sees of its node: cores, memory, GPUs, scratch."""
