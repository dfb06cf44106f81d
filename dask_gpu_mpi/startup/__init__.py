"""The meeting of the ranks, all messages, and the start as a state machine: agents register, the hub makes the plan."""
