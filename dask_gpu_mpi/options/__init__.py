"""Every option once: table, types, rules, and what Dask's configuration adds."""
