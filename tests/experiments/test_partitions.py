"""The comparison of partitions: its tables, and what it says of the published graphs."""

import json

import pytest

import doppler_jax as dj
from experiments import partitions
from experiments.partitions import PUBLISHED, PartitionSettings


def test_tables_are_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(partitions, "PUBLISHED", PUBLISHED[:1])
    settings = PartitionSettings(("chainmm",), ("p100x4", "v100x8"), quick=True, runs=tmp_path)
    partitions.main(settings)
    assert "Planner against uniform" in capsys.readouterr().out
    result = json.loads((tmp_path / "partitions.json").read_text())
    assert result["provenance"]["jax"]
    assert [c["cluster"] for c in result["comparisons"]] == ["p100x4", "v100x8"]
    for comparison in result["comparisons"]:
        uniform, planner = (comparison["by_strategy"][s] for s in ("uniform", "planner"))
        assert planner["makespan_s"] <= 1.02 * uniform["makespan_s"]
        assert planner["moved_bytes"] < uniform["moved_bytes"]
        assert uniform["flops"] >= 3 * 2 * 512**3
    text = (tmp_path / "partitions.md").read_text()
    assert "| chainmm, small | v100x8 |" in text
    assert "| chain_mm_112nodes, published | 76 | 80 |" in text
    assert "Made by `experiments.partitions`: commit " in text


def test_figures_are_those_of_the_placed_graph():
    workload, cluster = dj.make_workload("chainmm"), dj.make_cluster("p100x4")
    figures = partitions.measure(workload, cluster, "uniform")
    program = dj.trace(workload.fn, *workload.args)
    graph = dj.partition(program, 4, strategy="uniform", cluster=cluster).graph
    placed = dj.place(graph, dj.make_costs(graph, cluster), method="critical_path")
    assert figures.makespan_s == placed.makespan_s
    moved = graph.tensor_bytes[placed.schedule.transfer_tensor].sum()
    assert figures.moved_bytes == moved > 0
    assert (figures.tasks, figures.edges) == (graph.num_tasks, graph.num_edges)


@pytest.mark.parametrize("published", PUBLISHED, ids=lambda published: published.graph)
def test_published_figures_are_those_of_the_files(published, reference_graphs):
    graph = dj.load_graph(reference_graphs / f"{published.graph}.txt")
    assert (graph.num_tasks, graph.num_edges) == (published.tasks, published.edges)
    assert graph.flops.sum() == pytest.approx(published.compute, rel=1e-5)
    assert graph.tensor_bytes.sum() == pytest.approx(published.communication, rel=1e-5)


def test_what_is_said_of_the_published_tasks(reference_graphs):
    block = dj.load_graph(reference_graphs / "transformer_block_215nodes.txt").flops
    assert (block == 4096 * 4096 * 11008).sum() == 12
    assert (block == 4096**3).sum() == 24
    assert (block <= 4096**2).sum() == 94
    assert block.min() > 0
    chain = dj.load_graph(reference_graphs / "chain_mm_112nodes.txt").flops
    assert (chain == 10_000**3).sum() == 48
    layer = dj.load_graph(reference_graphs / "full_transformer_layer_261nodes.txt").flops
    assert (layer == 4096 * 32_000).sum() == 4
