"""Programs that try to get into jobs, and jobs under their attack."""
