"""Learned methods that DOPPLER is compared with, one file each, and their common trainer."""
