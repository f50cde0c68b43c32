"""What results look like to people.

`tables.py` formats durations and tables; `schedules.py` explains a schedule in words and
numbers, and `compare.py` two plans; `gantt.py` draws a schedule and `perfetto.py` writes it for
a timeline viewer; `page.py` writes the page that shows it in a browser, `timeline.py` the upper
part of that; `pictures.py` draws what studies compare. A new kind of picture goes there, beside
the others.
"""

from doppler_jax.reports.compare import Comparison
from doppler_jax.reports.gantt import plot_gantt
from doppler_jax.reports.perfetto import write_chrome_trace
from doppler_jax.reports.schedules import ScheduleExplanation

__all__ = [
    "Comparison",
    "ScheduleExplanation",
    "plot_gantt",
    "write_chrome_trace",
]
