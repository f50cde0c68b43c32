"""What results look like to people.

`tables.py` formats durations and tables; `schedules.py` explains a schedule in words and
numbers; `gantt.py` draws it and `perfetto.py` writes it for a timeline viewer; `pictures.py`
draws what studies compare. A new kind of picture goes there, beside the others.
"""
