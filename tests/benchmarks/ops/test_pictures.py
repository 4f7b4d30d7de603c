"""The pictures of `python -m benchmarks.ops`: which are drawn, and where their points and roofs lie."""

import pandas as pd

from benchmarks.ops.pictures import draw, roofline

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


def test_only_operators_that_were_measured_have_a_picture(tmp_path):
    frame = pd.DataFrame([gelu("tanh forward", 1, 10, 9), gelu("tanh backward", 1, 7, 6)])
    folder = tmp_path / "new" / "pictures"
    assert draw(frame, folder) == [folder / "gelu.png"]
    assert [path.name for path in folder.iterdir()] == ["gelu.png"]
