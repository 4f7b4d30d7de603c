"""The picture of the memory ladder: where its dots lie, and its words where nothing fits."""

from types import SimpleNamespace

from benchmarks.memory.picture import draw


def search(model, way, predicted):
    return SimpleNamespace(job=SimpleNamespace(model=model, way=way), predicted=predicted)


def ladder_of(fits, batch="-"):
    """A ladder of one model and two ways, of which the first has these figures and the second was not tried."""
    searches = [search("gpt2", "ddp", 6), search("gpt2", "fsdp", 0)]
    cells = {"ddp": {"fits": fits, "batch": batch, "tokens/s": "1,234"}, "fsdp": {"fits": "?"}}
    return SimpleNamespace(searches=searches, cells=lambda one: cells[one.job.way], heading=lambda: "a machine")


def test_each_model_has_a_panel(tmp_path):
    ladder = ladder_of("yes", "4")
    ladder.searches.append(search("1.6b", "ddp", 1))
    draw(ladder, tmp_path / "m.png")
    assert (tmp_path / "m.png").read_bytes().startswith(b"\x89PNG")
