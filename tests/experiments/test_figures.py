"""The figures of the docs are those that the command draws."""

from experiments import figures


def test_the_command_draws_every_figure(tmp_path):
    figures.main(tmp_path)
    drawn = {path.name for path in tmp_path.iterdir() if "<svg" in path.read_text()}
    assert drawn == {path.name for path in figures.FOLDER.iterdir()}
