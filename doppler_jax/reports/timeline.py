"""The timeline of a report: which device ran what, when; to zoom into, point at and search."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from doppler_jax.reports.gantt import TRANSFER, op_type
from doppler_jax.reports.schedules import ScheduleExplanation
from doppler_jax.simulator.activities import list_activities, list_waits
from doppler_jax.types import Schedule, TaskGraph

MOST_TRANSFERS = 10_000
"""That are drawn at once: where the window shows more of them, none is."""

MOST_EDGES = 3_000
"""Tasks that are drawn with an edge."""

CHAIN = "#d62728"
FOUND = "#000000"

TASKS = (-0.38, 0.12)
"""Where tasks are drawn in the row of their device, which reaches from -0.5 to 0.5."""
ARRIVALS = (0.16, 0.42)
"""Where transfers to it are, those from device 0 on top."""

_SHOW = """
const {left, right} = transfers.data
let count = 0
for (let k = 0; k < left.length; k++)
  if (right[k] >= range.start && left[k] <= range.end) count++
bars.visible = shown.active.includes(0) && count <= most
hint.visible = shown.active.includes(0) && count > most
chain.visible = shown.active.includes(1)
"""

_SEARCH = """
const word = box.value_input.trim().toLowerCase()
const names = tasks[0].data.name
const hits = []
if (word)
  for (let v = 0; v < names.length; v++)
    if (names[v].toLowerCase().includes(word)) hits.push(v)
tasks.forEach((of, p) => {
  const {y, left, right} = of.data
  found[p].data = {
    task: hits, y: hits.map((v) => y[v]),
    left: hits.map((v) => left[v]), right: hits.map((v) => right[v]),
  }
})
status.text = word ? `${hits.length} of ${names.length} tasks` : ""
box.tags = [-1]
"""

_NEXT = """
const hits = found[0].data.task
if (!hits.length) return
const k = (box.tags[0] + 1) % hits.length
box.tags = [k]
const left = Math.min(...tasks.map((of) => of.data.left[hits[k]]))
const right = Math.max(...tasks.map((of) => of.data.right[hits[k]]))
const margin = Math.max(5 * (right - left), 0.01 * range.reset_end)
range.setv({start: left - margin, end: right + margin})
status.text = `${k + 1} of ${hits.length}: ${tasks[0].data.name[hits[k]]}`
"""


@dataclasses.dataclass(frozen=True)
class Timeline:
    """A figure, and the sources of what is in it."""

    figure: Any
    tasks: Any
    found: Any  # those that are searched for


def draw_timeline(
    title: str,
    graph: TaskGraph,
    schedule: Schedule,
    explained: ScheduleExplanation,
    *,
    axis: tuple[float, str],
    x_range: Any,
    shown: Any,
    colours: dict[str, str],
) -> Timeline:
    """Returns the timeline of one schedule.

    Args:
      title: above it.
      graph: the task graph, N tasks.
      schedule: of it, with its transfers.
      explained: the same schedule's, for names and the chain.
      axis: seconds per unit of time, and the unit's name.
      x_range: the axis, shared by all timelines of a page.
      shown: boxes that say whether transfers are shown, and the critical chain.
      colours: of each operation, see `op_colours`.
    """
    from bokeh.models import ColumnDataSource
    from bokeh.plotting import figure

    (scale, unit), num_devices = axis, explained.busy_s.size
    picture = figure(
        title=title, x_range=x_range, y_range=(num_devices - 0.5, -0.5),
        height=int(np.clip(80 * num_devices, 160, 900)) + 110, sizing_mode="stretch_width",
        tools="xpan,xwheel_zoom,xbox_zoom,xzoom_in,xzoom_out,reset,save",
        active_drag="xpan", active_scroll="xwheel_zoom",
    )  # fmt: skip
    shares = zip(range(num_devices), explained.utilisation, strict=True)
    picture.yaxis.ticker = list(range(num_devices))
    picture.yaxis.major_label_overrides = {d: f"device {d}: {u:.0%}" for d, u in shares}
    picture.grid.grid_line_color = None
    tasks = ColumnDataSource(_task_columns(graph, schedule, explained.names, scale))
    _draw_tasks(picture, tasks, colours, unit)
    transfers, bars = _draw_transfers(picture, graph, schedule, tasks, num_devices, axis)
    chain = _draw_chain(picture, explained, scale)
    found = ColumnDataSource({name: [] for name in ("task", "y", "left", "right")})
    width = TASKS[1] - TASKS[0]
    picture.hbar(
        y="y", left="left", right="right", height=width + 0.06, source=found,
        fill_color=None, line_color=FOUND, line_width=2,
    )  # fmt: skip
    picture.add_layout(picture.legend[0], "above")
    picture.legend.orientation = "horizontal"
    picture.legend.click_policy = "hide"
    _let_choose(picture, shown, x_range, transfers, bars, chain)
    return Timeline(picture, tasks, found)


def _task_columns(
    graph: TaskGraph, schedule: Schedule, names: Sequence[str], scale: float
) -> dict[str, Any]:
    done = list_activities(schedule)
    waiter, cause = list_waits(graph, done, need_inputs=False)
    there_s = np.zeros(done.item.size)
    np.maximum.at(there_s, waiter, np.asarray(done.finish_s, np.float64)[cause])
    start_s, finish_s = np.asarray(schedule.start_s), np.asarray(schedule.finish_s)
    return {
        "name": list(names),
        "op": [op_type(name) for name in names],
        "y": np.asarray(schedule.placement, np.int32) + sum(TASKS) / 2,
        "left": start_s / scale,
        "right": finish_s / scale,
        "device": np.asarray(schedule.placement, np.int32),
        "takes": (finish_s - start_s) / scale,
        "waited": np.maximum(start_s - there_s[: graph.num_tasks], 0) / scale,
    }


def _draw_tasks(picture: Any, tasks: Any, colours: dict[str, str], unit: str) -> None:
    """Draws the tasks of each colour, by whose entry in the legend they are hidden."""
    from bokeh.models import CDSView, HoverTool, IndexFilter

    of_colour: dict[str, list[int]] = {colour: [] for colour in colours.values()}
    for v, op in enumerate(tasks.data["op"]):
        of_colour[colours[op]].append(v)
    # Among very many bars their edges would be all that one sees.
    edge = "white" if len(tasks.data["op"]) <= MOST_EDGES else None
    labels = {}
    for op, colour in colours.items():
        labels[colour] = "others" if colour in labels else op
    bars = [
        picture.hbar(
            y="y", left="left", right="right", height=TASKS[1] - TASKS[0], source=tasks,
            view=CDSView(filter=IndexFilter(rows)), color=colour, line_color=edge,
            line_width=0.4, legend_label=labels[colour],
        )
        for colour, rows in of_colour.items()
    ]  # fmt: skip
    rows = [
        ("", "@name"),
        ("device", "@device"),
        ("start", f"@left{{0.[0000]}} {unit}"),
        ("takes", f"@takes{{0.[000000]}} {unit}"),
        ("its inputs were there for", f"@waited{{0.[000000]}} {unit}"),
    ]
    picture.add_tools(HoverTool(renderers=bars, tooltips=rows, description="tasks"))


def _draw_transfers(
    picture: Any, graph: TaskGraph, schedule: Schedule, tasks: Any, num_devices: int,
    axis: tuple[float, str],
) -> tuple[Any, Any]:  # fmt: skip
    """Draws transfers in the row of their destination, below its tasks."""
    from bokeh.models import ColumnDataSource, CustomJSHover, HoverTool

    scale, unit = axis
    source = np.asarray(schedule.transfer_source, np.int32)
    to = np.asarray(schedule.transfer_destination, np.int32)
    item = np.asarray(schedule.transfer_tensor, np.int32)
    lane = (ARRIVALS[1] - ARRIVALS[0]) / num_devices
    producer = np.append(
        graph.tensor_producer, np.full(graph.num_inputs, -1)
    )  # ~i from the end
    transfers = ColumnDataSource(
        {
            "y": to + ARRIVALS[0] + lane * (source + 0.5),
            "left": np.asarray(schedule.transfer_start_s) / scale,
            "right": np.asarray(schedule.transfer_finish_s) / scale,
            "item": item,
            "maker": producer[item].astype(np.int32),
            "source": source,
            "device": to,
        }
    )
    bars = picture.hbar(
        y="y", left="left", right="right", height=0.85 * lane, source=transfers,
        color=TRANSFER, alpha=0.6, line_color=None, legend_label="transfer",
    )  # fmt: skip
    what = CustomJSHover(
        args={"tasks": tasks, "transfers": transfers},
        code="""
        const k = special_vars.index, {item, maker} = transfers.data
        return item[k] < 0 ? `graph input ${~item[k]}`
          : `tensor ${item[k]} of ${tasks.data.name[maker[k]]}`
        """,
    )
    rows = [("", "@item{custom}"), ("device", "@source to @device")]
    rows += [("start", f"@left{{0.[0000]}} {unit}"), ("arrives", f"@right{{0.[0000]}} {unit}")]
    hover = HoverTool(
        renderers=[bars], tooltips=rows, formatters={"@item": what}, description="transfers"
    )
    picture.add_tools(hover)
    return transfers, bars


def _draw_chain(picture: Any, explained: ScheduleExplanation, scale: float) -> Any:
    """Draws the critical chain, through the middle of its tasks and transfers."""
    lane = (ARRIVALS[1] - ARRIVALS[0]) / explained.busy_s.size
    times, rows = [], []
    for link in explained.chain:
        y = link.device + sum(TASKS) / 2
        if link.kind != "task":
            y = link.device + ARRIVALS[0] + lane * (link.source + 0.5)
        times += [link.start_s / scale, link.finish_s / scale]
        rows += [y, y]
    return picture.line(
        times, rows, line_color=CHAIN, line_width=2, legend_label="critical chain"
    )


def _let_choose(
    picture: Any, shown: Any, x_range: Any, transfers: Any, bars: Any, chain: Any
) -> None:
    """Shows what the boxes say, and no transfers where the window holds too many."""
    from bokeh.models import CustomJS, Label

    count = len(transfers.data["left"])
    hint = Label(
        x=8, y=4, x_units="screen", y_units="screen", text="zoom in to see transfers",
        text_font_size="12px", text_color="#555555", visible=count > MOST_TRANSFERS,
    )  # fmt: skip
    picture.add_layout(hint)
    bars.visible = count <= MOST_TRANSFERS
    parts = {"bars": bars, "hint": hint, "chain": chain, "shown": shown, "range": x_range}
    args = {**parts, "transfers": transfers, "most": MOST_TRANSFERS}
    show = CustomJS(args=args, code=_SHOW)
    shown.js_on_change("active", show)
    for end in ("start", "end"):
        x_range.js_on_change(end, show)


def search_row(timelines: Sequence[Timeline], x_range: Any, shown: Any) -> Any:
    """Returns the field that finds tasks by a part of their name, and the boxes beside it."""
    from bokeh.layouts import row
    from bokeh.models import Button, CustomJS, Div, TextInput

    box = TextInput(placeholder="find tasks by name", name="search", width=320, tags=[-1])
    button = Button(label="next", width=70, name="next")
    status = Div(width=420, render_as_text=True, align="center", name="status")
    args = {
        "box": box,
        "status": status,
        "tasks": [one.tasks for one in timelines],
        "found": [one.found for one in timelines],
        "range": x_range,
    }
    box.js_on_change("value_input", CustomJS(args=args, code=_SEARCH))
    go = CustomJS(args=args, code=_NEXT)
    box.js_on_event("value_submit", go)
    button.js_on_event("button_click", go)
    return row(box, button, shown, status, spacing=8)
