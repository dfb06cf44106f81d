"""The process of the user's script: how the script is run, what is changed in it for the cluster, and what it exits with."""
