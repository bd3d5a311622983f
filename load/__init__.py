"""The yardstick: traffic, benchmarks and reports over HTTP."""
