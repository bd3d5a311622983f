"""What runs between the matrix products on a CPU: few calls, one pass over memory each."""
