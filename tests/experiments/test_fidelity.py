"""Simulated against measured makespans: the choice of placements, the figures, the command."""

import json

import numpy as np
import pytest

import doppler_jax as dj
from doppler_jax.costs.calibration import Calibration, KernelTime
from experiments import fidelity_cells
from experiments.fidelity import FidelitySettings, main
from experiments.fidelity_cells import agree, choose_placements, steady_medians, with_medians
from experiments.yardsticks.layered import layered_problem


def test_agreement_of_a_simulator_that_is_right_up_to_a_factor():
    measured_s = np.array([1.0, 2.0, 4.0, 8.0])
    found = agree(1.5 * measured_s, measured_s)
    assert found.pearson == found.spearman == found.kendall == pytest.approx(1.0)
    assert found.mean_relative_error == found.bias == pytest.approx(0.5)
    assert (found.telling_pairs, found.ordered_share) == (6, 1.0)


def test_agreement_counts_wrong_pairs_among_those_that_can_be_told_apart():
    measured_s = np.array([1.00, 1.04, 1.20, 1.50])
    simulated_s = np.array([1.04, 1.00, 1.50, 1.20])
    found = agree(simulated_s, measured_s)
    # (1.00, 1.04) differ by less than 5 %; (1.20, 1.50) are swapped.
    assert (found.telling_pairs, found.ordered_share) == (5, pytest.approx(4 / 5))
    assert found.kendall == pytest.approx((4 - 2) / 6)
    assert found.spearman == pytest.approx(0.6)
    assert found.mean_relative_error == pytest.approx((0.04 + 0.04 / 1.04 + 0.25 + 0.2) / 4)
    assert agree(simulated_s[:2], measured_s[:2]).ordered_share is None


def test_what_placements_took_is_told_apart_from_how_fast_the_machine_was():
    worth_s = np.array([1.0, 1.1, 1.2, 1.3, 1.4])
    speed = np.array([[1.0], [1.7], [0.8], [1.2]])
    noise = np.ones((4, 5))
    noise[0, 1] = 3.0  # one run of one placement was disturbed
    found = steady_medians(worth_s * speed * noise)
    # The rounds' medians are 1.3 (the outlier shifts it), 2.04, 0.96 and 1.44.
    np.testing.assert_allclose(found, worth_s / 1.2 * (1.3 + 1.44) / 2, rtol=1e-12)


def test_a_kernel_takes_its_median_over_the_rounds():
    kernels = {name: KernelTime(name, 1.0, 4.0, (9.0, 9.0), 0.1) for name in ("a", "b")}
    before = Calibration(
        backend="ray",
        device_names=("x", "y"),
        capacity_bytes=np.full(2, np.inf),
        overhead_s=np.array([1e-5, 2e-5]),
        kernels=kernels,
        transfers={(0, 1, 256): 1e-4},
        transfer_noise=0.2,
    )
    rounds = {
        "a": np.array([[1.0, 3.0], [2.0, 5.0], [9.0, 4.0]]),
        "b": np.array([[1.0, 1.0], [3.0, 1.0], [4.0, 8.0]]),
    }
    found = with_medians(before, rounds)
    assert found.kernels["a"].seconds == (2.0, 4.0)
    assert found.kernels["b"].seconds == (3.0, 1.0)
    assert (found.kernels["a"].noise, found.transfers) == (0.1, before.transfers)


def test_placements_are_spread_over_the_makespans_that_there_are():
    graph, costs = layered_problem(32, 2)
    placements = choose_placements(graph, costs, 20, seed=0)
    assert placements.shape == (20, graph.num_tasks)
    assert len(np.unique(placements, axis=0)) == 20
    makespan_s = dj.simulate(graph, costs, placements).makespan_s
    assert (np.diff(makespan_s) >= 0).all()
    best = dj.place(graph, costs, method="heft").makespan_s
    assert makespan_s[0] <= best + 1e-12
    assert makespan_s[-1] > 1.2 * makespan_s[0]
    np.testing.assert_array_equal(placements, choose_placements(graph, costs, 20, seed=0))


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    return FidelitySettings(
        workloads=("chainmm",),
        preset="small",
        backend="local",
        num_devices=4,
        num_shards=2,
        placements=4,
        teaching=2,
        rounds=2,
        runs=tmp_path_factory.mktemp("runs"),
    )


@pytest.mark.slow
def test_the_command_measures_once_and_writes_all(settings, capsys, monkeypatch):
    main(settings)
    folder = settings.runs / "fidelity" / "localx4"
    (record,) = json.loads((folder / "fidelity.json").read_text())["workloads"]
    assert np.array(record["measured_s"]).shape == (2, 4)
    assert (np.array(record["measured_s"]) > 0).all()
    for costs in ("calibrated", "refitted"):
        simulated_s, agreement = record["simulated_s"][costs], record["agreement"][costs]
        assert set(simulated_s) == set(agreement) == set(fidelity_cells.LINKS)
        errors = [found["mean_relative_error"] for found in agreement.values()]
        assert errors == sorted(errors)
        assert np.array(simulated_s["serial"]).shape == (4,)
    assert (folder / "fidelity.png").read_bytes().startswith(b"\x89PNG")
    assert "| chainmm |" in (folder / "fidelity.md").read_text()
    before = capsys.readouterr().out

    def refuse(*args):
        raise AssertionError("measured again")

    monkeypatch.setattr(fidelity_cells, "load", refuse)
    main(settings)
    assert capsys.readouterr().out == before


def test_one_placement_is_nothing_to_compare():
    with pytest.raises(ValueError, match="--placements is 1"):
        main(FidelitySettings(placements=1))
