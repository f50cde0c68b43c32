"""A report in one file that opens offline: timelines, chain, links, memory, the search.

Bokeh (extra `report`) draws it, and is in each file.
"""

import html
from collections.abc import Sequence
from typing import Any

import numpy as np

from doppler_jax.budget import Curve
from doppler_jax.files import PathLike, write_text_atomic
from doppler_jax.reports.gantt import op_colours, op_type
from doppler_jax.reports.pictures import PALETTE
from doppler_jax.reports.schedules import ScheduleExplanation, explain_schedule
from doppler_jax.reports.tables import byte_unit, format_bytes, format_seconds, time_unit
from doppler_jax.simulator.memory import held_bytes, residency
from doppler_jax.types import Costs, Schedule, TaskGraph

MOST_STEPS = 4_000
"""Changes of a device's memory that are drawn; of more, the most of each of so many spans."""

_GO = """
const [k] = chain.selected.indices
if (k === undefined) return
const {start, takes} = chain.data
const margin = Math.max(5 * takes[k], 0.01 * range.reset_end)
range.setv({start: start[k] - margin, end: start[k] + takes[k] + margin})
"""


def write_report(
    path: PathLike,
    graph: TaskGraph,
    costs: Costs,
    panels: Sequence[tuple[str, Schedule]],
    *,
    title: str = "",
    names: Sequence[str] | None = None,
    about: str = "",
    curve: Curve | None = None,
    bound_s: float = 0.0,
) -> None:
    """Writes schedules of one graph as a page that opens offline; an old file is replaced.

    It shows each schedule's timeline, on one axis of time that can be zoomed; its critical
    chain; what went over each link; and the memory of each device over time.

    Args:
      path: of the HTML file.
      graph: the task graph, N tasks.
      costs: its costs on D devices: sizes and capacities.
      panels: a title and a schedule with its transfers each, simulated or measured.
      title: of the page.
      names: `[N]` of the tasks; their numbers if not given.
      about: plain text below the title; Markdown tables in it become tables.
      curve: of the search that found the first one, if it is to be shown.
      bound_s: below which nothing can be, for the curve.

    Raises:
      ValueError: there is no panel, a schedule is not legal or does not end, there is not one
        name per task, Bokeh is not there, or the file cannot be written.
    """
    if not panels:
        raise ValueError("no schedule to report: panels is empty")
    explained = [
        explain_schedule(graph, costs, schedule, names=names) for _, schedule in panels
    ]
    for (label, _), one in zip(panels, explained, strict=True):
        if not np.isfinite(one.makespan_s):
            raise ValueError(
                f"panel {label!r}: the schedule does not end; expected finite times"
            )
    try:
        from bokeh.embed import file_html
        from bokeh.layouts import column
        from bokeh.models import Div
        from bokeh.resources import INLINE
    except ImportError as error:
        raise ValueError(
            "a report needs Bokeh: pip install 'doppler-jax[report]', or bokeh itself"
        ) from error
    heading = f"<h1>{html.escape(title)}</h1>" if title else ""
    parts = [Div(text=_STYLE + heading + _as_html(about), sizing_mode="stretch_width")]
    parts += _draw(graph, costs, panels, explained)
    if curve is not None and len(curve.seconds) > 1:
        parts.append(_search(curve, bound_s))
    page = column(
        *parts, sizing_mode="stretch_width", spacing=12, styles={"padding": "0 24px 24px 12px"}
    )
    write_text_atomic(path, file_html(page, INLINE, title or "doppler_jax"))


_STYLE = """<style>
h1 {font-size: 22px; margin: 4px 0} h2 {font-size: 17px; margin: 4px 0}
table {border-collapse: collapse; margin: 6px 0}
td, th {padding: 2px 12px 2px 0; text-align: right; border-bottom: 1px solid #dddddd}
td:first-child, th:first-child {text-align: left}
p {margin: 4px 0; max-width: 60em}
</style>"""


def _as_html(text: str) -> str:
    """Returns paragraphs and Markdown tables, as `format_table` writes them, as HTML."""
    blocks = []
    for block in text.strip().split("\n\n"):
        lines = html.escape(block).splitlines()
        if not block.startswith("|"):
            blocks.append(f"<p>{'<br>'.join(lines)}</p>")
            continue
        cells = [line.strip("|").split("|") for line in lines if not line.startswith("| ---")]
        rows = (f"<tr><td>{'</td><td>'.join(row)}</td></tr>" for row in cells)
        blocks.append(f"<table>{''.join(rows)}</table>")
    return "".join(blocks)


def _draw(
    graph: TaskGraph,
    costs: Costs,
    panels: Sequence[tuple[str, Schedule]],
    explained: Sequence[ScheduleExplanation],
) -> list[Any]:
    """Returns the parts of the page, from top to bottom."""
    from bokeh.layouts import row
    from bokeh.models import CheckboxButtonGroup, Range1d

    from doppler_jax.reports.timeline import draw_timeline, search_row

    longest_s = max(one.makespan_s for one in explained)
    scale, unit = time_unit(longest_s)
    end = 1.01 * longest_s / scale or 1.0
    # As wide as the page may be dragged.
    x_range = Range1d(0, end, bounds=(-0.05 * end, 1.05 * end))
    shown = CheckboxButtonGroup(
        labels=["transfers", "critical chain"], active=[0, 1], name="shown"
    )
    colours = op_colours([op_type(name) for name in explained[0].names])
    timelines = [
        draw_timeline(
            f"{label}: {format_seconds(one.makespan_s)}", graph, schedule, one,
            axis=(scale, unit), x_range=x_range, shown=shown, colours=colours,
        )
        for (label, schedule), one in zip(panels, explained, strict=True)
    ]  # fmt: skip
    for k, timeline in enumerate(timelines):
        timeline.figure.name = f"timeline {k}"
    timelines[-1].figure.xaxis.axis_label = f"time ({unit})"
    parts = [search_row(timelines, x_range, shown)]
    parts += [timeline.figure for timeline in timelines]
    for (label, schedule), one in zip(panels, explained, strict=True):
        below = [_chain(label, one, scale, unit, x_range), _links(label, one)]
        if graph.has_bytes:
            below.append(_memory(label, graph, costs, schedule, x_range, scale, unit))
        parts.append(row(*below, sizing_mode="stretch_width", spacing=16))
    return parts


def _chain(
    label: str, explained: ScheduleExplanation, scale: float, unit: str, x_range: Any
) -> Any:
    """Returns the critical chain as a table; a click on a row shows it in the timeline."""
    from bokeh.layouts import column
    from bokeh.models import (
        ColumnDataSource,
        CustomJS,
        DataTable,
        Div,
        NumberFormatter,
        TableColumn,
    )  # fmt: skip

    chain = explained.chain
    items = [explained.item_and_place(link) for link in chain]
    source = ColumnDataSource(
        {
            "what": [what for what, _ in items],
            "where": [where for _, where in items],
            "start": [link.start_s / scale for link in chain],
            "takes": [(link.finish_s - link.start_s) / scale for link in chain],
            "waited": [link.waited_for for link in chain],
        }
    )
    number = NumberFormatter(format="0.[0000]")
    columns = [
        TableColumn(field="what", title=f"critical chain, times in {unit}", width=300),
        TableColumn(field="where", title="device", width=50),
        TableColumn(field="start", title="start", width=60, formatter=number),
        TableColumn(field="takes", title="takes", width=60, formatter=number),
        TableColumn(field="waited", title="waited for", width=70),
    ]
    table = DataTable(
        source=source, columns=columns, height=300, sizing_mode="stretch_width",
        index_position=None,
    )  # fmt: skip
    go = CustomJS(args={"chain": source, "range": x_range}, code=_GO)
    source.selected.js_on_change("indices", go)
    went = Div(text=f"<h2>{html.escape(label)}</h2><p>{explained.chain_went()}</p>")
    return column(went, table, sizing_mode="stretch_width", min_width=420)


def _links(label: str, explained: ScheduleExplanation) -> Any:
    """Returns the bytes that each link carried, a row a source."""
    from bokeh.models import ColumnDataSource, HoverTool
    from bokeh.plotting import figure
    from bokeh.transform import linear_cmap

    num_devices = explained.busy_s.size
    source, to = (~np.eye(num_devices, dtype=bool)).nonzero()
    moved = explained.moved_bytes[source, to]
    most = float(moved.max(initial=0.0)) or 1.0
    cells = ColumnDataSource(
        {
            "source": source,
            "device": to,
            "bytes": moved,
            "text": [format_bytes(x) if x else "" for x in moved],
            "ink": ["#ffffff" if x > 0.6 * most else "#222222" for x in moved],
            "busy": [f"{x:.0%}" for x in explained.link_utilisation[source, to]],
        }
    )
    limits = (-0.5, num_devices - 0.5)
    picture = figure(
        title=f"bytes over each link: {format_bytes(float(moved.sum()))}",
        x_range=limits, y_range=limits[::-1], height=340, width=420, tools="save",
        frame_align=False,
        x_axis_label="to device", y_axis_label="from device",
    )  # fmt: skip
    picture.xaxis.ticker = picture.yaxis.ticker = list(range(num_devices))
    picture.grid.grid_line_color = None
    colours = linear_cmap("bytes", _BLUES, 0, most)
    cell = picture.rect(
        x="device", y="source", width=0.94, height=0.94, source=cells, color=colours
    )
    if num_devices <= 8:
        picture.text(
            x="device", y="source", text="text", text_color="ink", source=cells,
            text_align="center", text_baseline="middle", text_font_size="11px",
        )  # fmt: skip
    rows = [("link", "@source to @device"), ("bytes", "@bytes{0,0}"), ("busy", "@busy")]
    picture.add_tools(HoverTool(renderers=[cell], tooltips=rows))
    return picture


_BLUES = [f"#{240 - 2 * k:02x}{246 - k:02x}{252 - k // 4:02x}" for k in range(0, 120, 2)]


def _memory(
    label: str,
    graph: TaskGraph,
    costs: Costs,
    schedule: Schedule,
    x_range: Any,
    scale: float,
    unit: str,
) -> Any:
    """Returns what each device holds over time, with its capacity where that is near."""
    from bokeh.models import Span
    from bokeh.plotting import figure

    held = residency(graph, costs, schedule)
    picture = figure(
        title=f"{label}: memory", x_range=x_range, height=340, sizing_mode="stretch_width",
        min_width=360, tools="xpan,xwheel_zoom,reset,save", active_scroll=None,
        x_axis_label=f"time ({unit})", frame_align=False,
    )  # fmt: skip
    steps = [held_bytes(held, d) for d in range(costs.num_devices)]
    most = max(num_bytes.max(initial=0.0) for _, num_bytes in steps)
    size, name = byte_unit(most)
    picture.yaxis.axis_label = name
    picture.y_range.start = 0
    for d, (times_s, num_bytes) in enumerate(steps):
        peak = format_bytes(num_bytes.max(initial=0.0))
        capacity = float(costs.capacity_bytes[d])
        of = "" if np.isinf(capacity) else f" of {format_bytes(capacity)}"
        times_s, num_bytes = thin_steps(times_s, num_bytes, MOST_STEPS)
        colour = PALETTE[d % len(PALETTE)]
        picture.step(
            times_s / scale, num_bytes / size, mode="after", color=colour, line_width=1.5,
            legend_label=f"device {d}: at most {peak}{of}",
        )  # fmt: skip
        if capacity < 2 * most:
            limit = {"line_color": colour, "line_dash": "dashed"}
            picture.add_layout(Span(location=capacity / size, dimension="width", **limit))
    picture.legend.click_policy = "hide"
    picture.legend.label_text_font_size = "11px"
    picture.legend.ncols = 2
    picture.add_layout(picture.legend[0], "below")
    return picture


def thin_steps(
    times_s: np.ndarray, values: np.ndarray, most: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns at most so many steps, each the largest of those that it stands for."""
    finite = np.isfinite(times_s)
    times_s, values = times_s[finite], values[finite]
    if len(values) <= most:
        return times_s, values
    first = np.arange(most) * len(values) // most
    return times_s[first], np.maximum.reduceat(values, first)


def _search(curve: Curve, bound_s: float) -> Any:
    """Returns the best objective against the seconds of the search."""
    from bokeh.models import ColumnDataSource, HoverTool, Range1d, Span
    from bokeh.plotting import figure

    scale, unit = time_unit(float(curve.makespan_s[-1]))
    best = ColumnDataSource(
        {
            "seconds": curve.seconds,
            "best": curve.makespan_s / scale,
            "evaluations": curve.evaluations,
        }
    )
    picture = figure(
        title="the search: best so far; dashed, the lower bound", height=260,
        x_axis_label="seconds of search", y_axis_label=f"objective ({unit})",
        sizing_mode="stretch_width", tools="pan,wheel_zoom,box_zoom,reset,save",
    )  # fmt: skip
    picture.step("seconds", "best", source=best, mode="after", color=PALETTE[0], line_width=2)
    points = picture.scatter("seconds", "best", source=best, color=PALETTE[0], size=6)
    picture.add_layout(
        Span(location=bound_s / scale, dimension="width", line_dash="dashed", line_width=1.5)
    )
    low, high = bound_s / scale, float(curve.makespan_s[0]) / scale
    picture.y_range = Range1d(low - 0.05 * (high - low), high + 0.05 * (high - low))
    rows = [("seconds", "@seconds{0.000}"), ("evaluations", "@evaluations{0,0}")]
    picture.add_tools(
        HoverTool(renderers=[points], tooltips=[("best", "@best{0.0000}"), *rows])
    )
    return picture
