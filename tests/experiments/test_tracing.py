"""Time and memory from a model's shapes to its task graph."""

import json
import pathlib
import subprocess
import sys

import pytest

from experiments.tracing import TracingSettings, main

ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_figures_are_printed_and_written(tmp_path, capsys):
    main(TracingSettings(workloads=("ffnn",), preset="small", num_shards=2, runs=tmp_path))
    result = json.loads((tmp_path / "tracing.json").read_text())
    (figure,) = result["figures"]
    assert figure["num_tasks"] > 4
    assert figure["trace_s"] > 0
    assert figure["partition_s"] > 0
    assert 1e7 < figure["peak_bytes"] < 1e11
    assert {"commit", "date", "jax"} <= set(result["provenance"])
    assert "ffnn" in capsys.readouterr().out
    assert "| ffnn |" in (tmp_path / "tracing.md").read_text()


@pytest.mark.slow
def test_llama_7b_becomes_a_task_graph_in_time(tmp_path):
    # In a process of its own, so that the peak of memory is tracing's.
    command = [sys.executable, "-m", "experiments.tracing", "--runs", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    layer, model = json.loads((tmp_path / "tracing.json").read_text())["figures"]
    assert layer["trace_s"] + layer["partition_s"] < 10
    assert model["num_tasks"] > 5000
    assert model["trace_s"] + model["partition_s"] < 60
    assert model["peak_bytes"] < 2e9
