"""A running cluster as people see it: what the scheduler knows of the job, and the view of `top`."""
