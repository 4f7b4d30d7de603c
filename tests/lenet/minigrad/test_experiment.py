"""Tests of the autograd experiment: training, the rows beside report B's, the command and what it refuses."""

import pandas as pd
import pytest
import torch

from gptscale.common.errors import NumericError
from gptscale.launchers.cli import main
from gptscale.lenet.data.sources import LabelledImages
from gptscale.lenet.minigrad.layers import build
from gptscale.lenet.minigrad.optimizers import SGD, Adam
from gptscale.lenet.minigrad.training import evaluate, is_whole_mnist, open_digits, time_steps, train, train_step
from gptscale.ops import registry as library


@pytest.fixture(scope="module")
def stripes():
    """Return noisy images of ten classes, learned in seconds, where class c is bright in rows 2c to 2c + 3."""
    random = torch.Generator().manual_seed(0)
    labels = torch.arange(600) % 10
    images = 0.3 * torch.rand(600, 1, 28, 28, generator=random)
    for image, label in zip(images, labels, strict=True):
        image[:, 2 * label : 2 * label + 4] += 0.7
    return LabelledImages(images, labels)


@pytest.fixture
def small_mnist(tmp_path, stripes, write_idx):
    """Write the four files of MNIST with few and simple images."""
    folder = tmp_path / "data" / "MNIST" / "raw"
    folder.mkdir(parents=True)
    for name, n in (("train", 100), ("t10k", 50)):
        write_idx(folder / f"{name}-images-idx3-ubyte", (stripes.images[-n:, 0] * 255).numpy())
        write_idx(folder / f"{name}-labels-idx1-ubyte", stripes.labels[-n:].numpy())
    return folder


@pytest.mark.parametrize("model", ["pure_linear", "simple_conv", "LeNet"])
def test_each_model_learns(model, stripes):
    net = build(model)
    rows = list(train(net, Adam(net.parameters(), 3e-3), stripes, stripes, epochs=4, batch_size=32, seed=0))
    assert [row.epoch for row in rows] == [0, 1, 2, 3]
    assert rows[-1].test_err < 0.02
    assert rows[-1].test_loss < rows[0].test_loss
    assert (rows[-1].train_loss, rows[-1].train_err) == evaluate(net, stripes)


def test_torchs_autograd_has_no_part_in_it(stripes):
    net = build("LeNet")
    optimizer = Adam(net.parameters(), 1e-3)
    with torch.enable_grad():
        loss = train_step(net, optimizer, stripes.images[:8], stripes.labels[:8])
    arrays, stack = [], [loss]
    while stack:
        node = stack.pop()
        arrays += [node.array, *([node.grad.array] if node.grad else [])]
        stack += node.inputs
    arrays += [array for _, *moments in optimizer.moments.values() for array in moments]
    assert len(arrays) > 40
    assert not any(array.requires_grad or array.grad_fn is not None for array in arrays)


def test_the_seed_fixes_everything(stripes):
    def rows(seed):
        net = build("pure_linear", seed=seed)
        run = train(net, SGD(net.parameters(), 0.05), stripes, stripes, epochs=2, batch_size=100, seed=seed)
        return [(row.train_loss, row.test_loss) for row in run]

    assert rows(1) == rows(1) != rows(2)


def test_every_image_is_taken_once_an_epoch(stripes, monkeypatch):
    taken = []
    position = {image.sum().item(): i for i, image in enumerate(stripes.images)}
    monkeypatch.setattr(
        "gptscale.lenet.minigrad.training.train_step",
        lambda model, optimizer, images, labels: taken.extend(position[image.sum().item()] for image in images),
    )
    net = build("pure_linear")
    list(train(net, SGD([], 0.1), stripes, stripes, epochs=2, batch_size=128, seed=0))
    assert sorted(taken[:600]) == sorted(taken[600:]) == list(range(600))
    assert taken[:600] != taken[600:]


def test_a_loss_that_is_no_number_ends_it(stripes):
    net = build("LeNet")
    run = train(net, SGD(net.parameters(), 1e4), stripes, stripes, epochs=1, batch_size=50, seed=0)
    with pytest.raises(NumericError, match="lower --lr"):
        next(run)


@pytest.mark.slow
def test_pure_linear_on_mnist(real_mnist):
    """Train two epochs, after which report B's test error was 6.67 and 4.40 % (of twenty epochs)."""
    digits = open_digits(str(real_mnist))
    assert is_whole_mnist(digits)
    net = build("pure_linear")
    *_, row = train(net, Adam(net.parameters(), 1e-3), digits.train, digits.test, epochs=2, batch_size=128, seed=0)
    assert row.test_err < 0.06


def test_times_of_a_step(stripes):
    net = build("LeNet", pool_backward="loop")
    before = [p.array.clone() for p in net.parameters()]
    times = time_steps(net, stripes.images[:2], stripes.labels[:2], 2)
    pools_s = times.pool_1_backward_s + times.pool_2_backward_s
    assert times.forward_s > 0
    assert 0 < times.pool_2_backward_s < times.pool_1_backward_s < pools_s < times.backward_s
    assert all(torch.equal(old, p.array) and p.grad is None for old, p in zip(before, net.parameters(), strict=True))


@pytest.mark.slow
def test_the_command_trains_times_and_writes(small_mnist, tmp_path, capsys):
    csv, md, png = tmp_path / "rows.csv", tmp_path / "tables.md", tmp_path / "curves.png"
    words = f"lenet minigrad --data {small_mnist} --epochs 2 --batch-size 10 --timed-steps 1 --csv {csv} --md {md} --png {png}"
    assert main(words.split()) == 0
    said = capsys.readouterr().out
    assert "100 images to learn from, 50 to test with" in said
    assert "the old figures are of the whole of MNIST" in said
    rows = pd.read_csv(csv)
    columns = "model epoch train_loss train_err test_loss test_err epoch_time_s".split()
    assert list(rows.columns[:7]) == columns
    assert list(rows.model) == ["pure_linear"] * 2 + ["simple_conv"] * 2 + ["LeNet"] * 2
    kernel = "cpp" if library.ready() else "python"
    assert list(rows.pool_backward.dropna()) == [kernel] * 2
    ops = pd.read_csv(tmp_path / "rows-ops.csv")
    assert list(ops.pool_backward) == ["loop", "windows", kernel]
    assert ops.pool_1_backward_s[0] > ops.pool_1_backward_s[2]
    assert png.read_bytes().startswith(b"\x89PNG")
    assert (rows.epoch_cpu_s > 0).all()
    lines = md.read_text().splitlines()
    assert f"| LeNet, {kernel} | {rows.train_loss.iloc[-1]:.4f} |" in md.read_text()
    assert len([line for line in lines if "| 340.0x |" in line]) == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["curves.png", "data", "rows-ops.csv", "rows.csv", "tables.md"]


def test_the_loops_train_to_the_same_rows(small_mnist, tmp_path):
    rows = {}
    for name in ("loop", "windows", "python", "auto"):
        csv = tmp_path / f"{name}.csv"
        words = f"lenet minigrad --data {small_mnist} --out {tmp_path} --model LeNet --epochs 1 --batch-size 4 "
        words += f"--train-samples 8 --timed-steps 0 --pool-backward {name} --csv {csv}"
        assert main(words.split()) == 0
        rows[name] = pd.read_csv(csv)
    columns = "epoch train_loss train_err test_loss test_err".split()
    for name in ("loop", "windows", "python"):
        pd.testing.assert_frame_equal(rows[name][columns], rows["auto"][columns], rtol=1e-4)
        assert list(rows[name].pool_backward) == [name]


def test_the_default_data_needs_no_download(tmp_path, monkeypatch):
    pytest.importorskip("sklearn", reason="scikit-learn brings the digits")
    monkeypatch.chdir(tmp_path)
    assert main("lenet minigrad --model pure_linear --epochs 4 --lr 3e-3 --batch-size 32 --csv rows.csv".split()) == 0
    assert pd.read_csv("rows.csv").test_err.iloc[-1] < 0.08


def test_more_images_than_there_are(small_mnist, refused):
    words = ["lenet", "minigrad", "--data", str(small_mnist), "--train-samples", "101"]
    assert "101 of 100 images, in --train-samples, use 1 to 100" in refused(words)
