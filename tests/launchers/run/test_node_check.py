"""What is said of nodes that are not alike."""

from gptscale.launchers.cli import main
from gptscale.launchers.run.node_check import interface_to, problems, slow_ones

NODE = {"torch": "2.11.0", "python": "3.11.7", "folder": "", "clock_ahead_s": 0.0, "product_tflops": 1.0}


def test_each_fault_names_its_node():
    nodes = [NODE | {"host": f"n{i}", "link_gib_per_s": 4.0 if i else 0.0} for i in range(4)]
    assert problems(nodes) + slow_ones(nodes) == []
    nodes[1] |= {"torch": "2.10.0", "clock_ahead_s": -3.0}
    nodes[2] |= {"folder": "sees 3 of 4 files in results, which is not shared", "product_tflops": 0.5}
    nodes[3] |= {"link_gib_per_s": 1.0}
    assert problems(nodes) + slow_ones(nodes) == [
        "torch differs: 2.11.0 on n0, n2, n3; 2.10.0 on n1",
        "n2 sees 3 of 4 files in results, which is not shared",
        "the clock of n1 is -3.0 s from that of n0",
        "n2 is slow: 0.50 of the usual 1.00 TFLOP/s",
        "n3 is slow: 1.00 of the usual 4.00 GiB/s",
    ]


def test_the_interface_has_a_name():
    assert interface_to("127.0.0.1") == "lo"


def test_outside_an_allocation_it_says_what_to_type(capsys, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert main(["doctor", "--nodes"]) == 2
    assert "salloc --nodes 2 gptscale doctor --nodes" in capsys.readouterr().err
