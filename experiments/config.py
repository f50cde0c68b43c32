"""Checks of settings; see `doppler_jax.training.settings`."""

from doppler_jax.problems import Strategy
from doppler_jax.training.settings import StageSettings, check_settings

__all__ = ["StageSettings", "Strategy", "check_settings"]
