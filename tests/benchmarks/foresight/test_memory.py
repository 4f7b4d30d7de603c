"""`python -m benchmarks.foresight.memory`: a line for each program, and an exit status for those that did not run."""

from types import SimpleNamespace

from benchmarks.foresight import memory
from gptscale.common.errors import ConfigError


def test_programs_of_others_stand_beside_what_they_published(tmp_path, monkeypatch, capsys):
    file = tmp_path / "published.csv"
    file.write_text(
        "what,folder,options,command,figure,gib\n"
        f"titan,{tmp_path},--as h200,torchrun train.py,reserved,10\nother,{tmp_path},,python a.py,allocated,1\n"
    )

    def simulate(options, command, rank, folder):
        if command[0] == "python":
            raise ConfigError("no such program", "behind --", "write it")
        assert (options.device_kind, rank, folder) == ("h200", "0", tmp_path)
        its_memory = SimpleNamespace(reserved=11 * 2**30)
        return SimpleNamespace(memory=lambda: its_memory, facts={"torch": "2.6"})

    monkeypatch.setattr(memory.ProgramOptions, "simulate", simulate)
    assert memory.main(["--programs", str(file)]) == 1
    titan, other = capsys.readouterr().out.splitlines()
    assert titan == "titan: reserved 10.00 GiB published, 11.00 simulated, +10.0%, torch 2.6"
    assert other.startswith("other: no such program")
