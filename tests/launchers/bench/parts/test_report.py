"""The lines of the tables of `gptscale bench parts`."""

import math

from gptscale.launchers.bench.parts.report import TITLES, cells, heading

ROW = {
    "way": "auto, as is",
    "failure": "",
    "forward_ms": 0.5,
    "both_ms": 1.25,
    "over_first": 1.0,
    "peak_gib": 0.125,
    "gb_per_s": 10.0,
    "copy_gb_per_s": 40.0,
    "tflops": 0.3,
    "product_tflops": 0.4,
    "error": 2e-7,
}


def test_a_rate_stands_beside_its_share_of_the_ceiling():
    line = dict(zip(("way", *TITLES), cells(ROW), strict=True))
    assert line == {
        "way": "auto, as is",
        "forward ms": "0.500",
        "both ms": "1.250",
        "of first": "1.000",
        "GiB": "0.125",
        "GB/s": "10",
        "of copy": "25%",
        "TFLOP/s": "0.3",
        "of product": "75%",
        "error": "2.0e-07",
    }


def test_what_a_part_does_not_have_is_a_dash():
    """None from a measurement, or NaN when the row was read from a frame."""
    for nothing in (None, math.nan):
        line = dict(zip(TITLES, cells({**ROW, "forward_ms": nothing, "tflops": nothing})[1:], strict=True))
        assert (line["forward ms"], line["TFLOP/s"], line["of product"]) == ("-", "-", "-")


def test_a_way_that_failed_says_why_in_place_of_figures():
    assert cells({**ROW, "failure": "out of memory"}) == ["auto, as is", "out of memory"]


def test_the_heading_names_machine_shape_and_ceilings():
    facts = "a CPU,2.11,2,float32,320,16,128,50257,8".split(",")
    names = "device torch_version threads dtype hidden heads seq_len vocab_size batch_size".split()
    shared = dict(zip(names, facts, strict=True)) | {"copy_gb_per_s": 1234.56, "product_tflops": 0.125}
    assert heading(shared).splitlines() == [
        "a CPU, torch 2.11, 2 threads, float32",
        "hidden 320, 16 heads, sequence 128, vocabulary 50257, batch 8; copy 1,234.6 GB/s, product 0.125 TFLOP/s",
    ]
