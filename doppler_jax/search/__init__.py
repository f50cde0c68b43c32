"""Searches for short placements, in jitted steps.

Read `objective` (what a placement is worth), `anytime` (what a search is, and how it is run
within a budget), then `moves` (what all searches change), and one file a search: `annealing`,
`local_search`, `evolution`, `memetic`, `random_search`. `memory` keeps placements within the
devices' memory.
A new search is a frozen dataclass of `anytime.Search` in a file of its own.
"""
