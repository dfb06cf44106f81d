"""Views of a running cluster and its work for people: the scheduler's records, `top`, and the report."""
