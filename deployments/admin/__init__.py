"""The admin port: what operators see and change while the service runs."""
