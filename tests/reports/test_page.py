"""The page of a plan: what is in it, and what it does in a browser."""

import json
import re
import sys

import numpy as np
import pytest

import doppler_jax as dj
from doppler_jax.graphs.families import make_family
from doppler_jax.reports.page import thin_steps, write_report
from tests.chromium import CHROMIUM, Page
from tests.simulator.cases import small_problem, with_transfers

GRAPH, COSTS = small_problem([1, 2, 4], [(0, 8, [1, 2])], 2)
NAMES = ["a.first_0", "a.exp_1", "<b>exp</b>_2"]
SCHEDULE = dj.simulator.simulate_oracle(GRAPH, COSTS, [0, 0, 1])
"""Device 0: task 0 from 0 to 1 s, 1 to 3 s; the tensor arrives at 9 s; device 1: 9 to 13 s."""

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="Debian's chromium is not there")


def large_plan(num_tasks):
    """A layered graph placed on eight devices, and names as programs have them."""
    graph = make_family("layered", np.random.default_rng(0), num_tasks)
    cluster = dj.Cluster(flops_per_s=[1.0] * 8, link_bytes_per_s=1.0)
    placed = dj.place(graph, dj.make_costs(graph, cluster), method="heft")
    return placed, [
        f"layer{v // 400}.{('dot', 'exp', 'mul')[v % 3]}_{v}" for v in range(num_tasks)
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("page")


@pytest.fixture(scope="module")
def page(folder):
    """The page of the small schedule, in the browser."""
    curve = dj.place(GRAPH, COSTS, max_evaluations=50, method="annealing").curve
    path = folder / "x.html"
    write_report(
        path, GRAPH, COSTS, [("one", SCHEDULE)], title="A & B", names=NAMES, curve=curve,
        about="Words.\n\n| a | b |\n| --- | ---: |\n| x | <1> |\n",
    )  # fmt: skip
    with Page(path) as opened:
        yield opened
        assert opened.errors == []
        assert {url.split(":")[0] for url in opened.requests} <= {"file", "data"}


@needs_browser
def test_search_marks_tasks_and_goes_from_one_to_the_next(page):
    page.click(*page.point("search"))
    page.type("EXP")
    page.wait("Bokeh.documents[0].get_model_by_name('status').text == '2 of 3 tasks'")
    seen = []
    for _ in range(3):
        page.press_enter()
        seen.append([page.property("timeline 0", f"x_range.{end}") for end in ("start", "end")])
        seen[-1].append(page.property("status", "text"))
    (start, end, text), after, again = seen
    assert start < 1 < 3 < end < 13.1
    assert text == "1 of 2: a.exp_1"
    assert after[0] < 9 < 13 < after[1]
    assert after[2] == "2 of 2: <b>exp</b>_2"
    assert again == seen[0]
    page.click(*page.point("next"))
    assert page.property("status", "text") == after[2]


@needs_browser
def test_pointing_tells_and_the_wheel_zooms(page):
    page.eval(
        "Bokeh.documents[0].get_model_by_name('timeline 0').x_range.setv({start:0,end:14})"
    )
    x, y = page.point("timeline 0", 11, 0.87)
    page.mouse("mouseMoved", x - 1, y)
    page.mouse("mouseMoved", x, y)
    text = """(() => {const seen = []
      const walk = (node) => {
        if (node.nodeType == 3) seen.push(node.textContent.trim())
        if (node.nodeName != 'STYLE' && node.nodeName != 'SCRIPT')
          [...node.childNodes, ...(node.shadowRoot?.childNodes ?? [])].forEach(walk)
      }
      walk(document.body)
      return seen.join(' ')})()"""
    page.wait(f"{text}.includes('its inputs were there for')")
    shown = page.eval(text)
    assert re.search(r"device: +1 +start: +9 s +takes: +4 s", shown), shown
    before = [page.property("timeline 0", f"x_range.{end}") for end in ("start", "end")]
    page.mouse("mouseWheel", x, y, deltaX=0, deltaY=-240)
    page.wait(f"Bokeh.documents[0].get_model_by_name('timeline 0').x_range.start > {before[0]}")
    start, end = (page.property("timeline 0", f"x_range.{end}") for end in ("start", "end"))
    assert before[0] < start < 11 < end < before[1]


@needs_browser
def test_a_large_plan_is_light_and_shows_transfers_from_near(folder):
    placed, names = large_plan(20_000)
    path = folder / "large.html"
    placed.report(path, names=names)
    assert path.stat().st_size < 15e6
    shown = "renderers.filter((r) => r.data_source.data.maker)[0].visible"
    with Page(path) as page:
        assert len(placed.schedule.transfer_tensor) > 10_000
        assert not page.property("timeline 0", shown)
        page.click(*page.point("search"))
        page.type("dot_300")
        page.press_enter()
        assert page.property("timeline 0", shown)
        assert page.property("status", "text").startswith("1 of ")
        assert page.errors == []


def test_a_page_says_what_it_is_of(tmp_path):
    placed = dj.place(GRAPH, COSTS, method="heft")
    path = tmp_path / "x.html"
    path.write_text("old")
    placed.report(path, names=NAMES, title="A <title>")
    text = path.read_text()
    assert "<title>A &lt;title&gt;</title>" in text
    assert not re.search(r"""<(script|link)[^>]+(src|href)=""", text)
    assert not list(tmp_path.glob(".*"))
    sent = json.dumps(placed._about())[1:-1]
    assert sent in text
    assert "3 tasks on 2 devices by heft, queue in_order: 7.000 s, which no plan beats" in sent


def test_no_tasks_make_a_page(tmp_path):
    graph, costs = small_problem([], [], 2)
    dj.place(graph, costs, method="heft").report(tmp_path / "x.html")
    assert (tmp_path / "x.html").stat().st_size > 1e6


def test_thinned_steps_keep_the_peak():
    times_s, values = np.arange(1000.0), np.random.default_rng(0).random(1000)
    kept_s, most = thin_steps(np.append(times_s, np.inf), np.append(values, 9), 10)
    assert kept_s.tolist() == times_s[::100].tolist()
    assert most.tolist() == values.reshape(10, 100).max(axis=1).tolist()
    assert thin_steps(times_s, values, 1000)[1].tolist() == values.tolist()


def test_what_cannot_be_shown_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "x.html"
    one = [("one", SCHEDULE)]
    with pytest.raises(ValueError, match="panels is empty"):
        write_report(path, GRAPH, COSTS, [])
    with pytest.raises(ValueError, match="names has 1 entries, expected 3"):
        write_report(path, GRAPH, COSTS, one, names=["a"])
    with pytest.raises(ValueError, match="tensor 0 has no transfer to device 1"):
        write_report(path, GRAPH, COSTS, [("one", with_transfers(SCHEDULE))])
    with pytest.raises(ValueError, match=r"absent/x\.html: No such file"):
        write_report(tmp_path / "absent" / "x.html", GRAPH, COSTS, one)
    monkeypatch.setitem(sys.modules, "bokeh.embed", None)
    with pytest.raises(ValueError, match=r"needs Bokeh: pip install 'doppler-jax\[report\]'"):
        write_report(path, GRAPH, COSTS, one)
    assert not path.exists()
