"""Batch systems and launchers: a class for each; job scripts; and the command ``launch``."""
