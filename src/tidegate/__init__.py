"""Tidegate: session admission and KV-aware routing for RL rollouts."""

__version__ = "0.1.0"
