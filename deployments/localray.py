"""A Ray of this machine alone. Imports ray inside the function: ray reads its authentication settings when imported."""

import logging
import os
import secrets


def start_local_ray(num_cpus: int = 8) -> None:
    """Start Ray with token authentication; the logical CPUs only place actors, they pin nothing."""
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import ray

    ray.init(num_cpus=num_cpus, include_dashboard=False, log_to_driver=False, logging_level=logging.WARNING)
