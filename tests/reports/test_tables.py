import numpy as np
import pytest

from doppler_jax.reports.tables import format_seconds, format_table, print_table, time_unit


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (1200.08, "1200 s"),
        (12345.0, "12345 s"),
        (1.0, "1.000 s"),
        (0.99999, "1000.0 ms"),
        (0.0123456, "12.35 ms"),
        (-0.0123456, "-12.35 ms"),
        (3.3e-5, "33.00 us"),
        (2e-9, "0.002000 us"),
        (np.float32(0.5), "500.0 ms"),
        (float("inf"), "inf s"),
        (float("nan"), "nan s"),
    ],
)
def test_format_seconds(seconds, text):
    assert format_seconds(seconds) == text


def test_digits_and_the_unit_of_zero():
    assert format_seconds(1200.0765, digits=6) == "1200.08 s"
    assert time_unit(0.0) == (1.0, "s")


def test_format_table_aligns_and_escapes():
    assert format_table(("method", "makespan (ms)"), [("a|b", "1.5"), ("single", "12")]) == (
        "| method | makespan (ms) |\n| --- | ---: |\n| a\\|b | 1.5 |\n| single | 12 |\n"
    )


@pytest.mark.parametrize("make", [format_table, lambda *args: print_table("t", *args)])
def test_row_of_wrong_length_is_refused(make):
    with pytest.raises(ValueError, match=r"row 1 has 1 cells for 2 columns: \('c',\)"):
        make(("x", "y"), [("a", "b"), ("c",)])


def test_print_table_loses_no_text(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    long = "x" * 60
    rows = [("matmul[0,1]", "1.5"), (long, "2")]
    print_table("Makespans [here]", ("task", "time (ms)"), rows)
    printed = capsys.readouterr().out
    for text in ("Makespans [here]", "matmul[0,1]", "time (ms)", "1.5"):
        assert text in printed
    assert printed.count("x") == 60
