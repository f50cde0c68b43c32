"""Figures that the paper publishes (Yao et al., ICLR 2026, arXiv 2505.23131).

Milliseconds measured on 4 P100; ours are of other code, sizes and machines, so that orders
and ratios compare, not the figures themselves.
"""

WORKLOADS = ("chainmm", "ffnn", "llama_block", "llama_layer")

_SYSTEMS = ("critical_path", "placeto", "gdp", "enumerative", "doppler", "doppler_sys")

TABLE_2_MS = {
    "chainmm": dict(zip(_SYSTEMS, (230.4, 137.1, 198.0, 139.0, 122.5, 123.4), strict=True)),
    "ffnn": dict(zip(_SYSTEMS, (217.8, 126.3, 100.3, 50.2, 49.9, 47.4), strict=True)),
    "llama_block": dict(zip(_SYSTEMS, (230.9, 411.5, 336.5, 172.7, 191.5, 160.3), strict=True)),
    "llama_layer": dict(zip(_SYSTEMS, (292.6, 295.1, 231.5, 174.8, 167.0, 150.6), strict=True)),
}
"""Execution time by workload and method; `doppler_sys` is all three stages."""

ABLATION_MS = {
    "chainmm": {"doppler": 123.4, "doppler_sel": 127.0, "doppler_plc": 121.6},
    "ffnn": {"doppler": 47.4, "doppler_sel": 59.1, "doppler_plc": 63.2},
    "llama_block": {"doppler": 160.3, "doppler_sel": 175.6, "doppler_plc": 172.9},
    "llama_layer": {"doppler": 150.6, "doppler_sel": 161.7, "doppler_plc": 159.5},
}
"""All three stages, with both policies learned, SEL alone, PLC alone."""

SYNCHRONOUS_MS = {
    "chainmm": {"work_conserving": 139.0, "bulk_synchronous": 185.3},
    "ffnn": {"work_conserving": 50.2, "bulk_synchronous": 76.9},
}
"""The same placement run in two ways."""

INSIDE_SHARE = {"zero-shot": 0.827, "fine-tuned": 0.947}
"""Of the traffic on 8 devices in two islands, what stays inside; 2,000 episodes between."""
