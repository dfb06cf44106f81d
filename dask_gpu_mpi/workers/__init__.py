"""The Dask workers of one rank: class, options, start, end, plugins and logs."""
