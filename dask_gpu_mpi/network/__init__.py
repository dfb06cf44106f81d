"""Addresses, transports and credentials."""
