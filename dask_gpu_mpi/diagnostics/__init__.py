"""What is known of a running cluster and its work, recorded and shown."""
