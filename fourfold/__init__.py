"""fourfold: train, plan, audit and run large language models on a four-dimensional grid of devices."""

__version__ = "0.1.0"
