"""The engine room: models, proposers, acceptance and the round loop."""
