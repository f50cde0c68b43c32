import pathlib
import subprocess
import sys

import pytest

from experiments import stage3_study
from experiments.isolation import choose_backend
from experiments.stage3_study import COLUMNS, StudySettings, table_row
from tests.commands import assert_one_error_line, run

ROOT = pathlib.Path(__file__).resolve().parents[2]
RECORD = {
    "workload": "ffnn",
    "tasks": 24,
    "believed": "ten times",
    "stage2": [0, 1],
    "stage3": [1, 0],
    "stage2_s": 0.02,
    "stage3_s": 0.015,
    "ratio": 0.75,
    "interval": [0.7, 0.8],
    "measured_placements": 262,
}


def against(ratio, low, is_aborted=False):
    interval = None if low is None else [low, 2 * ratio]
    return {"ratio": ratio, "interval": interval, "is_aborted": is_aborted}


@pytest.mark.parametrize(
    ("stages", "expected"),
    [
        ((against(1.4, 1.2), against(1.1, 0.9)), ("+40.0%", "+10.0%", "75%")),
        ((against(1.01, 0.98), against(0.9, 0.8)), ("+1.0%", "-10.0%", "")),
        ((against(3.0, None, True), against(1.0, 0.9)), (">+200.0%", "+0.0%", "100%")),
    ],
)
def test_rows_say_what_was_lost_and_won_back(stages, expected):
    names = ("stage2_against_calibrated", "stage3_against_calibrated")
    row = table_row({**RECORD, **dict(zip(names, stages, strict=True))})
    assert len(row) == len(COLUMNS)
    assert row[4:6] == ("0.750 (0.700 to 0.800)", "262")
    assert row[6:] == expected


def test_rows_of_true_costs_have_nothing_to_win_back():
    assert table_row({**RECORD, "interval": None})[4:] == ("0.750", "262", "", "", "")


def test_rows_tell_what_was_delivered():
    dropped = {**RECORD, "stage3": [0, 1], "ratio": 1.15, "interval": [1.1, 1.2]}
    assert table_row(dropped)[4] == "1.000; dropped 1.150 (1.100 to 1.200)"
    assert table_row({**dropped, "ratio": 1.0, "interval": None})[4] == "1.000"


def test_the_study_stays_within_its_episodes(monkeypatch, capsys, tmp_path):
    words = ("--num-updates", "24", "--runs", str(tmp_path))
    assert run(monkeypatch, stage3_study.main, StudySettings, *words) == 2
    assert_one_error_line(capsys.readouterr().err, "up to 314 placements; expected at most 300")
    assert not list(tmp_path.iterdir())


def test_isolated_devices_are_chosen_where_they_are():
    assert choose_backend("local", 2) == "local"
    assert choose_backend("ray", 2) == "ray"
    assert choose_backend("auto", 1) == choose_backend("auto", 10_000) == "local"


@pytest.mark.slow
def test_a_quick_study(tmp_path):
    """It ends with a table of all rows; a second run reads what the first measured."""
    command = [
        sys.executable, "-m", "experiments.stage3_study", "--quick", "--backend", "local",
        "--workloads", "ffnn", "--runs", str(tmp_path), "--training.batch", "4",
        "--training.proposal-evaluations", "256",
    ]  # fmt: skip
    tables = []
    for _ in range(2):
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
        tables.append((tmp_path / "stage3_study/localx2/small/study.md").read_text())
    assert tables[0] == tables[1]
    assert tables[0].count("| ffnn, ") == len(stage3_study.FACTORS)
