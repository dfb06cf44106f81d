"""A running cluster and its work as people see them: what the scheduler knows and records, the view of `top`, and the report."""
