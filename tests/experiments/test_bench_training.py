import json

import jax
import numpy as np
import pytest

from doppler_jax.training import sim_rl
from doppler_jax.training.sim_rl import SimConfig
from experiments import bench_training
from experiments.bench_training import TrainingSettings
from experiments.yardsticks.layered import layered_problem

TINY = SimConfig(batch=8, minibatches=1, num_elites=1, num_chains=4, search_rounds=1)


def bench(folder, name="tiny", **settings):
    graph, costs = layered_problem(10, 2)  # of the sizes' bucket: they share compilations
    settings = TrainingSettings(**{"sizes": (9, 10), "repeats": 2, "update": TINY, **settings})
    bench_training.bench(name, graph, costs, settings, folder)
    return json.loads((folder / "bench_training.json").read_text())


@pytest.mark.slow
def test_the_benchmark_is_written(tmp_path, capsys, monkeypatch):
    static = ("policy", "config", "shards")
    update = jax.jit(sim_rl.update_on, static_argnames=static)
    monkeypatch.setattr(
        bench_training,
        "sim_update",
        lambda s, p, c, k: update(s, p, policy=c, config=k, shards=1),
    )
    result = bench(tmp_path)
    assert (tmp_path / "bench_training.md").read_text() in capsys.readouterr().out
    assert result["devices"] == 1
    assert set(result["parts"]) == {
        "update",
        "update without local search",
        "sampling, one device",
    }
    assert list(result["by_size"]) == ["9", "10"]
    for timing in [*result["parts"].values(), *result["by_size"].values()]:
        assert (timing["batch"], len(timing["seconds"])) == (8, 2)
    more, fewer = (np.median(result["by_size"][n]["seconds"]) for n in ("10", "9"))
    expected = np.log(more / fewer) / np.log(10 / 9)
    assert result["slope"] == pytest.approx(expected)


def test_one_size_says_nothing_of_growth(tmp_path):
    with pytest.raises(ValueError, match=r"--training.sizes are \(8,\); expected 2 or more"):
        bench(tmp_path, sizes=(8, 8)[:1])


@pytest.mark.gpu
def test_the_same_command_measures_a_gpu(tmp_path):
    result = bench(tmp_path, update=SimConfig())
    assert "cpu" not in result["provenance"]["devices"].lower()
