import json

import numpy as np
import pytest

import doppler_jax as dj
from tests.generators import make_schedule

MOVED = [(0, 0, 1, 1.0, 2.5), (1, 0, 1, 1.0, 2.0), (-1, 0, 1, 2.0, 3.0)]
SCHEDULE = make_schedule([0, 1, 1], [0.0, 3.0, 0.0], [1.0, 4.0, 0.5], MOVED)
NAMES = ("a", "b", "c")


def read(path):
    return json.loads(path.read_text())


def test_every_task_and_transfer_has_its_place_and_time(tmp_path):
    path = tmp_path / "trace.json"
    dj.reports.write_chrome_trace(path, SCHEDULE, NAMES, device_names=["cpu:0", "cpu:1"])
    events = read(path)["traceEvents"]
    threads = [e for e in events if e["name"] == "thread_name"]
    rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in threads}
    slices = [e for e in events if e["ph"] == "X"]
    found = {e["name"]: (e["pid"], rows[e["pid"], e["tid"]], e["ts"], e["dur"]) for e in slices}
    assert found == {
        "a": (0, "compute", 0.0, 1e6),
        "b": (1, "compute", 3e6, 1e6),
        "c": (1, "compute", 0.0, 5e5),
        "tensor 0": (1, "from cpu:0", 1e6, 1.5e6),
        "tensor 1": (1, "from cpu:0", 1e6, 1e6),
        "graph input 0": (1, "from cpu:0", 2e6, 1e6),
    }
    processes = [e for e in events if e["name"] == "process_name"]
    assert [e["args"]["name"] for e in processes] == ["device cpu:0", "device cpu:1"]
    times = [e["ts"] for e in slices]
    assert times == sorted(times)


@pytest.mark.parametrize(
    ("plan", "ranks"),
    [
        (dj.Plan([0, 1, 1], [0, 2, 1], "in_order"), {"a": 0, "b": 2, "c": 1}),
        (dj.Plan([0, 1, 1], [0, 2, 1]), {}),  # `fifo` heeds none
    ],
)
def test_a_plan_is_written_beside_what_it_did(tmp_path, plan, ranks):
    path = tmp_path / "trace.json"
    dj.reports.write_chrome_trace(path, SCHEDULE, NAMES, plan=plan)
    data = read(path)
    assert data["otherData"]["queue"] == plan.queue
    tasks = [e for e in data["traceEvents"] if e.get("cat") == "task"]
    assert {e["name"]: e["args"]["rank"] for e in tasks if "rank" in e["args"]} == ranks


def test_chores_are_drawn_from_when_they_begin(tmp_path):
    path = tmp_path / "trace.json"
    chores = [("lay", -1, -0.5, 0.0), ("set up", 1, -0.25, 0.0), ("join", -1, 4.0, 4.5)]
    dj.reports.write_chrome_trace(path, SCHEDULE, NAMES, chores=chores)
    events = read(path)["traceEvents"]
    rows = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert rows == {0: "device 0", 1: "device 1", 2: "caller"}
    slices = {e["name"]: (e["pid"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"}
    assert slices["lay"] == (2, 0.0, 5e5)
    assert slices["set up"] == (1, 2.5e5, 2.5e5)
    assert slices["join"] == (2, 4.5e6, 5e5)
    assert slices["a"] == (0, 5e5, 1e6)


def test_what_devices_spend_on_transfers_is_among_their_tasks(tmp_path):
    path = tmp_path / "trace.json"
    dj.reports.write_chrome_trace(path, SCHEDULE, NAMES, handling=[(1, 0.5, 0.75)])
    slices = [e for e in read(path)["traceEvents"] if e["ph"] == "X"]
    (handled,) = [e for e in slices if e["cat"] == "handling"]
    (task,) = [e for e in slices if e["name"] == "c"]
    assert (handled["ts"], handled["dur"]) == (5e5, 2.5e5)
    assert (handled["pid"], handled["tid"]) == (task["pid"], task["tid"])
    with pytest.raises(ValueError, match="not finite"):
        dj.reports.write_chrome_trace(path, SCHEDULE, NAMES, handling=[(1, 0.5, np.nan)])


def test_slices_of_a_row_do_not_overlap(tmp_path):
    rng = np.random.default_rng(0)
    start = rng.random(50) * 1e-3
    schedule = SCHEDULE.replace(
        transfer_tensor=np.arange(50),
        transfer_source=rng.integers(0, 2, 50),
        transfer_destination=rng.integers(2, 4, 50),
        transfer_start_s=start,
        transfer_finish_s=start + rng.random(50) * 1e-4,
    )
    dj.reports.write_chrome_trace(tmp_path / "trace.json", schedule, NAMES)
    busy_until = {}
    for event in read(tmp_path / "trace.json")["traceEvents"]:
        if event["ph"] == "X":
            row = (event["pid"], event["tid"])
            assert event["ts"] >= busy_until.get(row, 0.0) - 1e-9
            busy_until[row] = event["ts"] + event["dur"]
    assert 4 < len([row for row in busy_until if row[0] >= 2]) < 50


@pytest.mark.parametrize("inferred", [True, False])
def test_marks_inferred_starts(tmp_path, inferred):
    dj.reports.write_chrome_trace(
        tmp_path / "trace.json", SCHEDULE, NAMES, inferred_starts=inferred
    )
    data = read(tmp_path / "trace.json")
    marks = [e["args"].get("start") for e in data["traceEvents"] if e["ph"] == "X"]
    assert marks == ["inferred" if inferred else None] * 6
    assert data["otherData"]["starts"] == ("inferred" if inferred else "measured")


def test_writes_an_empty_schedule(tmp_path):
    dj.reports.write_chrome_trace(tmp_path / "trace.json", make_schedule([], [], []), ())
    assert read(tmp_path / "trace.json")["traceEvents"] == []


@pytest.mark.parametrize(
    ("schedule", "names", "options", "message"),
    [
        (SCHEDULE, NAMES[:2], {}, "names has 2 entries, expected 3"),
        (SCHEDULE, NAMES, {"device_names": ["x"]}, "device_names has 1 of 2 devices"),
        (SCHEDULE.replace(finish_s=np.array([1.0, np.inf, 0.5])), NAMES, {}, "not finite"),
    ],
)
def test_refuses_and_leaves_the_old_file(tmp_path, schedule, names, options, message):
    path = tmp_path / "trace.json"
    path.write_text("old")
    with pytest.raises(ValueError, match=message):
        dj.reports.write_chrome_trace(path, schedule, names, **options)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
