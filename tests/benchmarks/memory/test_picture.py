"""The picture of the memory ladder: where its dots lie, and its words where nothing fits."""

from types import SimpleNamespace

import pytest

from benchmarks.memory.picture import draw, draw_panel
from gptscale.results.render import subplots


def search(model, way, predicted):
    return SimpleNamespace(job=SimpleNamespace(model=model, way=way), predicted=predicted)


def ladder_of(fits, batch="-"):
    """A ladder of one model and two ways, of which the first has these figures and the second was not tried."""
    searches = [search("gpt2", "ddp", 6), search("gpt2", "fsdp", 0)]
    cells = {"ddp": {"fits": fits, "batch": batch, "tokens/s": "1,234"}, "fsdp": {"fits": "?"}}
    return SimpleNamespace(searches=searches, cells=lambda one: cells[one.job.way], heading=lambda: "a machine")


@pytest.fixture
def axis():
    _, ((axis,),) = subplots(1, 1, (4, 3))
    return axis


def dots(axis):
    return [(line.get_xdata()[0], line.get_ydata()[0], line.get_fillstyle()) for line in axis.lines]


def test_measured_and_predicted_are_dots_on_the_line_of_their_way(axis):
    ladder = ladder_of("yes", "4")
    draw_panel(axis, ladder, ladder.searches, ["fsdp", "ddp"])
    assert dots(axis) == [(6, 1, "none"), (4, 1, "full")]
    assert [text.get_text().strip() for text in axis.texts] == ["1,234"]
    assert [label.get_text() for label in axis.get_yticklabels()] == ["fsdp", "ddp"]


@pytest.mark.parametrize(("fits", "words"), [("no", ["does not fit"]), ("failed", ["failed"]), ("?", [])])
def test_where_no_batch_was_measured_there_are_words(fits, words, axis):
    ladder = ladder_of(fits)
    draw_panel(axis, ladder, ladder.searches, ["ddp", "fsdp"])
    assert [text.get_text() for text in axis.texts] == words
    # Nothing was predicted to fit for the second.
    assert dots(axis) == [(6, 0, "none")]


def test_each_model_has_a_panel(tmp_path):
    ladder = ladder_of("yes", "4")
    ladder.searches.append(search("1.6b", "ddp", 1))
    draw(ladder, tmp_path / "m.png")
    assert (tmp_path / "m.png").read_bytes().startswith(b"\x89PNG")
