"""Entry points; run them as modules from the project's root."""
