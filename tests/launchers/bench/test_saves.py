"""`gptscale bench saves`: a turn of each way on a small model, what the table says of it, and refusals."""

import pytest

from gptscale.launchers.bench import saves
from gptscale.launchers.cli import main


def turn(number, way, total_s, held_s=0.0, **figures):
    facts = {"processor_s": total_s, "peak_gib": 1.0, "peak_before_gib": 0.5, "steps": 10}
    shared = {"n_params": 2_000_000, "state_gib": 0.25, "threads": 1, "torch_version": "2"}
    return {"round": number, "way": way, "total_s": total_s, "held_s": held_s, **facts, **shared, **figures}


def test_a_way_is_compared_with_the_turn_of_its_own_round_that_saves_nothing(capsys):
    """In round 2 the machine is slower, for all three alike."""
    saves.show(
        [
            turn(1, "none", 10.0),
            turn(1, "waits", 14.0, 4.0),
            turn(1, "behind", 11.0, 0.5),
            turn(2, "none", 20.0),
            turn(2, "waits", 24.0, 4.0),
            turn(2, "behind", 21.0, 0.5),
        ]
    )
    text = capsys.readouterr().out
    rows = {words[0]: words[1:] for line in text.splitlines() if (words := line.split())}
    assert rows["waits"][:5] == ["4.00", "4.00", "4.00", "to", "4.00"]
    assert rows["behind"][:5] == ["0.50", "1.00", "1.00", "to", "1.00"]
    # A half of a second of four, and one second of four.
    assert "behind: steps wait 12% and the run is longer by 25% of what a save that waits costs" in text
    assert "2 million parameters, 0.25 GiB of state, 10 steps of 1.500 s" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rounds", "0"], "rounds 0 is out of range"),
        (["--out", "nowhere"], "nowhere is no folder, in --out"),
        (["--csv", "nowhere/s.csv"], "nowhere/s.csv cannot be written, in --csv"),
        (["--model", "gtp2"], "unknown model 'gtp2', in --model"),
    ],
)
def test_refused(words, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "saves", *words]) == 2
    (line,) = (line for line in capsys.readouterr().err.splitlines() if "error" in line)
    assert message in line
    assert list(tmp_path.iterdir()) == []
