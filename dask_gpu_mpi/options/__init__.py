"""Every option once: the table, how its values are read, and how options depend on each other."""
