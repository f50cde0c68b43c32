"""Learned placement of JAX programs: see the README."""
