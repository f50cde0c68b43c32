"""Devices that are processes: a runtime of our own, which a launcher starts.

From below: `transport.py` moves tensors between processes; `device.py` is what runs in each of
them; `session.py` is how this process asks them; `driver.py` runs programs on them, as
`ProcessDevices`; `ray.py` starts them as Ray actors, and is all that knows of Ray. Another
launcher would be another such file: a `Session`, and a function that starts a `Worker` in each
process.
"""
