"""The test bed: several hosts on this machine, and a Slurm over them."""
