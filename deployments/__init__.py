"""The nervous system: Ray, HTTP, the round channel."""
