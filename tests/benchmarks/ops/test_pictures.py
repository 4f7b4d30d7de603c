"""The pictures of `python -m benchmarks.ops`: which are drawn, and where their points and roofs lie."""

import pandas as pd
import pytest

from benchmarks.ops.pictures import by_case, draw, over_size, roofline

COMMON = {"dtype": "fp32", "threads": 1, "copy_gb_per_s": 20.0, "matmul_gflop_per_s": 100.0}


def convolution(what, flops, n_bytes, ours_us, torch_us):
    figures = {"flops": flops, "bytes": n_bytes, "ours_us": ours_us, "torch_us": torch_us}
    return {"operator": "conv_bias_relu", "what": what, **figures, **COMMON}


def gelu(what, size_kib, ours, torchs):
    rates = {"ours_gb_per_s": ours, "torch_gb_per_s": torchs}
    return {"operator": "gelu", "what": what, "size_kib": size_kib, **rates, **COMMON}


def test_flops_stand_over_operations_per_byte_under_the_roof():
    # 8 and 2 operations for each byte; 8 million in 100 microseconds are 80 GFLOP/s.
    rows = [convolution("5x5 forward", 8e6, 1e6, 100.0, 200.0), convolution("5x5 both", 24e6, 12e6, 2000.0, 1000.0)]
    (axis,) = roofline(pd.DataFrame(rows)).axes
    roof = dict(zip(axis.lines[0].get_xdata(), axis.lines[0].get_ydata(), strict=True))
    # Copying at 20 GB/s meets a product's 100 GFLOP/s at 5 operations for each byte.
    assert roof == {1.0: 20.0, 5.0: 100.0, 16.0: 100.0}
    points = {c.get_label(): c.get_offsets().tolist() for c in axis.collections}
    assert points == {
        "PyTorch, forward": [[8.0, 40.0]],
        "ours, forward": [[8.0, 80.0]],
        "PyTorch, both": [[2.0, 24.0]],
        "ours, both": [[2.0, 12.0]],
    }


def test_a_panel_per_direction_with_ours_solid_and_pytorchs_dotted():
    rows = [gelu("tanh forward", 1, 10, 9), gelu("tanh forward", 4, 12, 8), gelu("tanh backward", 1, 7, 6)]
    forward, backward = over_size(pd.DataFrame(rows)).axes
    assert (forward.get_title(), backward.get_title()) == ("forward, fp32, 1 thread(s)", "backward, fp32, 1 thread(s)")
    lines = {(line.get_label(), line.get_linestyle()): list(line.get_ydata()) for line in forward.lines}
    assert lines["copy", "-"] == [20.0, 20.0]
    assert lines["gelu tanh", "-"] == [10, 12]
    assert [ys for (_, style), ys in lines.items() if style == ":"] == [[9, 8]]
    assert list(backward.lines[1].get_ydata()) == [7]


def test_each_case_has_a_line_of_its_own():
    rows = [{**gelu("2x2 forward", 1, 10, 9), "operator": "max_pool2d"}, gelu("3x3 forward", 1, 5, 4)]
    (axis,) = by_case(pd.DataFrame(rows)).axes
    assert [label.get_text() for label in axis.get_yticklabels()] == ["2x2 forward", "3x3 forward"]
    ours = axis.collections[-1].get_offsets()
    assert ours[:, 0].tolist() == [10, 5]
    assert ours[:, 1].tolist() == pytest.approx([0.2, 1.2])


def test_only_operators_that_were_measured_have_a_picture(tmp_path):
    frame = pd.DataFrame([gelu("tanh forward", 1, 10, 9), gelu("tanh backward", 1, 7, 6)])
    folder = tmp_path / "new" / "pictures"
    assert draw(frame, folder) == [folder / "gelu.png"]
    assert [path.name for path in folder.iterdir()] == ["gelu.png"]
