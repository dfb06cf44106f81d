"""From inventories and options to the plan: pure functions."""
