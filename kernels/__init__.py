"""Runs placed programs on real devices."""
