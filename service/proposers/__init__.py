"""Ways to guess tokens, one file a family."""
