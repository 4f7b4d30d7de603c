"""`gptscale lenet mistakes --run RUN`: images that a run learned from, and the test images that its model gets wrong."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from gptscale.common.errors import ConfigError, visible
from gptscale.common.settings.checks import check_output_file, check_range
from gptscale.common.settings.command_line import parse
from gptscale.common.settings.needs import OptionNeed
from gptscale.lenet.comparison.tables import show
from gptscale.lenet.run.config import TORCHVISION_NEED, VisionConfig
from gptscale.results.render import DPI, markdown

if TYPE_CHECKING:
    import pandas as pd
    from torch import Tensor

    from gptscale.lenet.run.preflight import VisionPlan

# Images side by side, and rows of images that were learned from.
COLUMNS, SAMPLE_ROWS = 10, 4


@dataclass(frozen=True)
class MistakesOptions:
    """A run that saved a checkpoint, and what is made of its mistakes."""

    run: Path | None = None
    """Folder of a run with --save-every, such as results/runs/NAME."""
    data: str = ""
    """What the run had as --data, if that lies elsewhere now."""
    data_dir: Path = Path("data")
    """Where torchvision keeps mnist and cifar10."""
    download: bool = False
    """Download mnist or cifar10 to --data-dir if it is not there."""
    most: int = 40
    """Mistakes that are drawn, those first of which the model is surest."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """As in gptscale lenet train."""
    csv: Path | None = None
    """File for a row of each mistake: the image's number, its class, the model's answer, and the probability it gives."""
    md: Path | None = None
    """File for the confusions in Markdown."""
    png: Path | None = None
    """File for the picture; default mistakes.png in the run's folder."""

    NEEDS: ClassVar[tuple[OptionNeed, ...]] = (TORCHVISION_NEED,)

    def __post_init__(self) -> None:
        check_range(self.most, 1, 1000, "most")
        for name in ("csv", "md", "png"):
            check_output_file(getattr(self, name), f"--{name}")


def main(argv: Sequence[str]) -> int:
    """Find the mistakes of a run's newest checkpoint, print the confusions, and draw samples and mistakes."""
    options = parse(MistakesOptions, argv, prog="gptscale lenet mistakes", about="What a trained model gets wrong.")
    if options.run is None:
        raise ConfigError("no run is given", "in --run", "give the folder of one, such as results/runs/NAME")
    plan = plan_of(options.run, options)
    wrong = mistakes(plan, options.run)
    lines, n = confusions(wrong, plan.data.classes), len(plan.data.test)
    heading = f"{plan.config.model} on {plan.data.name}: {len(wrong)} of {n:,} test images wrong ({len(wrong) / n:.2%})"
    print(visible(heading))
    if lines:
        show(lines)
    if options.csv:
        wrong.to_csv(options.csv, index=False)
    if options.md:
        options.md.write_text(markdown(lines, left=["confusion"], notes=[heading]) if lines else heading + "\n")
    picture = options.png or options.run / "mistakes.png"
    draw(plan, wrong.head(options.most), heading, picture)
    for path in (options.csv, options.md, picture):
        if path:
            print(f"wrote {visible(str(path))}")
    return 0


def plan_of(folder: Path, options: MistakesOptions) -> VisionPlan:
    """Return the plan of the run in `folder` as one process, or raise ConfigError if its images are not these."""
    # It imports torch, so not before the options are read.
    from gptscale.lenet.run.preflight import make_plan, world_from_environment
    from gptscale.results.record.run_folder import read_json

    record = read_json(folder / "run.json")
    fields = {field.name for field in dataclasses.fields(VisionConfig)}
    settings: dict[str, Any] = {name: value for name, value in record.get("config", {}).items() if name in fields}
    if "model" not in settings:
        raise ConfigError(
            f"{folder} is no run of gptscale lenet", "in --run", "give a folder such as results/runs/NAME"
        )
    settings |= {"data_dir": Path(settings["data_dir"]), "device": options.device}
    if options.data:
        settings |= {"data": options.data, "data_dir": options.data_dir, "download": options.download}
    alone = {"out": folder, "run_name": None, "resume": None, "strategy": "auto", "backend": "auto", "wandb": False}
    config = VisionConfig(**settings | alone)
    plan = make_plan(config, world_from_environment(config))
    if plan.data.fingerprint != record.get("workload", {}).get("data_fingerprint"):
        raise ConfigError(f"{plan.data.name} are other images than the run's", "in --data", "give those that it had")
    return plan


def mistakes(plan: VisionPlan, folder: Path) -> pd.DataFrame:
    """Return a row for each test image that the newest checkpoint of a run gets wrong, the surest answers first."""
    import pandas as pd
    import torch

    from gptscale.common.checkpoint.reader import newest_readable
    from gptscale.lenet.run.engine import VisionEngine
    from gptscale.lenet.run.loop import TestSet

    reader = newest_readable(folder / "checkpoints")
    if reader is None:
        raise ConfigError(f"{folder} has no checkpoint", "in --run", "train with --save-every 1")
    engine: Any = VisionEngine(plan.config, plan.shape, plan.world)
    reader.verify().load_into(engine)
    engine.module.eval()
    with torch.no_grad():
        logits = torch.cat([engine.module(images).float() for images, _ in TestSet(plan).batches()])
    probabilities, answers = logits.softmax(1).max(1)
    columns = {"label": plan.data.test.labels, "answer": answers.cpu(), "probability": probabilities.cpu()}
    rows = pd.DataFrame({name: values.numpy() for name, values in columns.items()}).rename_axis("image").reset_index()
    return rows[rows.label != rows.answer].sort_values("probability", ascending=False, ignore_index=True)


def confusions(wrong: pd.DataFrame, classes: Sequence[str], most: int = 10) -> list[dict[str, str]]:
    """Return a line for each of the commonest confusions, with the number of images."""
    counts = Counter(zip(wrong.label, wrong.answer, strict=True))
    return [
        {"confusion": f"{classes[label]} taken for {classes[answer]}", "images": str(n)}
        for (label, answer), n in counts.most_common(most)
    ]


def draw(plan: VisionPlan, wrong: pd.DataFrame, heading: str, path: Path) -> None:
    """Write a picture with some images of each class that were learned from, and below them the mistakes."""
    from matplotlib.figure import Figure

    train, test, classes = plan.data.train, plan.data.test, plan.data.classes
    wrong_rows = max(1, -(-len(wrong) // COLUMNS))
    figure = Figure(figsize=(11, 1.05 * SAMPLE_ROWS + 1.45 * wrong_rows + 1.2), layout="constrained")
    parts: Any = figure.subfigures(2, 1, height_ratios=[1.05 * SAMPLE_ROWS + 0.6, 1.45 * wrong_rows + 0.6])
    above, below = parts
    above.suptitle(f"learned from: {len(train):,} images such as these", fontsize=10)
    below.suptitle(f"{heading}\nabove each: what it is, what it is taken for, and how surely", fontsize=10)
    shown = classes[:COLUMNS]
    places = [(train.labels == label).nonzero()[:SAMPLE_ROWS, 0].tolist() for label in range(len(shown))]
    axes = above.subplots(SAMPLE_ROWS, len(shown), squeeze=False)
    for row in range(SAMPLE_ROWS):
        for column, of_class in enumerate(places):
            image = train.images[of_class[row]] if row < len(of_class) else None
            paint(axes[row, column], image, shown[column] if row == 0 else "")
    axes = below.subplots(wrong_rows, COLUMNS, squeeze=False)
    for i, panel in enumerate(axes.flat):
        if i >= len(wrong):
            paint(panel, None, "")
            continue
        one = wrong.iloc[i]
        title = f"{classes[int(one.label)]}, not {classes[int(one.answer)]}\n{one.probability:.0%}"
        paint(panel, test.images[int(one.image)], title)
    figure.savefig(path, dpi=DPI)


def paint(panel: Any, image: Tensor | None, title: str) -> None:
    """Draw one image with its title, or leave the place empty."""
    panel.axis("off")
    panel.set_title(title, fontsize=8)
    if image is not None:
        # Grey images are drawn as ink on paper.
        pixels = image.permute(1, 2, 0).squeeze(-1).numpy()
        panel.imshow(pixels, cmap="gray_r", interpolation="nearest")
