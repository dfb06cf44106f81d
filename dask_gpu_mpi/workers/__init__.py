"""The Dask workers of one rank: their class and options, how they are made, followed and closed, and where they log."""
