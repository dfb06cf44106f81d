"""The node of a rank: cores, memory, GPUs, scratch."""
