"""The planner: list what is valid, leave out by a bound what does not fit or is far slower, try the rest, and sort."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from gptscale.common.engines.pipeline.stages import SPLIT_BACKWARD
from gptscale.common.errors import GptscaleError
from gptscale.common.measure.flops import hardware_flops_per_token
from gptscale.common.recipe_config import RecipeConfig
from gptscale.common.settings.run import Run
from gptscale.common.settings.run_config import RunConfig
from gptscale.foresight.memory.bound import Places
from gptscale.foresight.plan.enumeration import Candidate, enumerate_runs
from gptscale.foresight.plan.question import Cluster
from gptscale.foresight.plan.rows import PlannedRow, Split, Tried, places_of
from gptscale.foresight.plan.trials import MEASURED
from gptscale.foresight.price.cost import Costs
from gptscale.foresight.price.record import Work
from gptscale.recipes import RECIPES, get

# A row with this share of the fastest row's speed is as good: no prediction of its grade can tell more.
AS_GOOD, AS_GOOD_BY_DATA_SHEET = 0.98, 0.95
# A row whose step lasts by the estimate so many times as long as the fastest one's that fits is not worth a trial.
WORTH = 1.5
# Trials for each row of the table, so that what does not fit after all does not take for ever.
TRIES = 3
Trial = Callable[[PlannedRow], Tried]


@dataclass
class WorkPlan:
    """All rows that were tried and fit, the fastest first, and what was not tried.

    also: of each row the recipes that split in the same way. nearest: the row that lacks least, if none fits. listed: how many
    runs are valid. splits: of these, that may fit by the bound. left_out: recipes that were not listed, and trials that failed,
    with the reason.
    """

    cluster: Cluster
    config: RunConfig
    rows: list[PlannedRow]
    also: dict[Split, list[str]]
    nearest: PlannedRow | None
    listed: int
    splits: int
    left_out: dict[str, str]

    @property
    def recommended(self) -> PlannedRow:
        """Return the row to take: of those that are as good as the fastest, the simplest recipe. Some row must fit."""
        share = AS_GOOD if self.rows[0].timing.grade == MEASURED else AS_GOOD_BY_DATA_SHEET
        as_good = [row for row in self.rows if row.tokens_per_s >= share * self.rows[0].tokens_per_s]
        order = list(RECIPES)
        return min(as_good, key=lambda row: (order.index(row.run.recipe), -row.tokens_per_s))

    @property
    def recommended_number(self) -> int:
        return next(i for i, row in enumerate(self.rows, 1) if row is self.recommended)


def plan(
    config: RunConfig,
    cluster: Cluster,
    recipes: Sequence[str],
    trial: Trial,
    *,
    wanted: int,
    at_once: int = 1,
    host_memory: int | None = None,
    tell: Callable[[str], None] = lambda words: None,
) -> WorkPlan:
    """Plan a piece of work on a cluster: try rows until `wanted` splits of them fit, `at_once` at the same time.

    host_memory: bytes of a node, None where it is not known. tell: is told what is tried.
    """
    groups, left_out = enumerate_runs(config, cluster, recipes)
    fitting, nearest, n_listed = list[PlannedRow](), None, 0
    costs = None if cluster.is_cpu else cluster.costs(config.precision)
    for group in groups:
        n_listed += len(group)
        for row in _of_group(group, cluster, costs, host_memory):
            if row.may_fit:
                fitting.append(row)
            elif nearest is None or row.margin > nearest.margin:
                nearest = row
    splits, also = _splits(fitting, list(recipes))
    n_splits = len(splits)
    rows, tries = list[PlannedRow](), 0
    with ThreadPoolExecutor(at_once) as pool:
        while splits and len(rows) < wanted and tries < TRIES * wanted:
            longest = WORTH * min((row.estimate for row in rows), default=math.inf)
            n = min(at_once, wanted - len(rows))
            batch, splits = [forms for forms in splits[:n] if forms[0].estimate <= longest], splits[n:]
            if not batch:
                break
            tell(f"{len(rows)} of {wanted} rows tried, now {', '.join(forms[0].name for forms in batch)}")
            tries += len(batch)
            for forms, tried in zip(batch, pool.map(lambda forms: _try(forms[0], trial), batch), strict=True):
                if isinstance(tried, Tried):
                    row = dataclasses.replace(forms[0], tried=tried)
                    if row.may_fit:
                        rows.append(row)
                        continue
                    nearest = row if nearest is None or row.margin > nearest.margin else nearest
                    if forms[1:]:
                        # The next form has its turn at once: its split was worth a trial.
                        splits.insert(0, forms[1:])
                else:
                    left_out[f"a trial of {forms[0].name}, {forms[0].detail}"] = tried
    order = {name: place for place, name in enumerate(recipes)}
    # Equally fast rows stand in the order of the table of recipes, the simplest first.
    rows.sort(key=lambda row: (-round(row.tokens_per_s, 3), order[row.run.recipe], -row.margin))
    return WorkPlan(cluster, config, rows, also, None if rows else nearest, n_listed, n_splits, left_out)


def _try(row: PlannedRow, trial: Trial) -> Tried | str:
    """Return what a trial tells, or why it failed."""
    try:
        return trial(row)
    except GptscaleError as error:
        return str(error)[:160]


def _of_group(
    group: Iterable[Candidate], cluster: Cluster, costs: Costs | None, host_memory: int | None
) -> Iterator[PlannedRow]:
    """Yield the forms of a run, from the fastest on, until one fits for sure."""
    for run, config in group:
        places = places_of(run, config)
        if host_memory is not None and places.host * cluster.per_node > host_memory:
            continue
        estimate = 0.0 if costs is None else estimated_seconds(run, config, places, costs)
        row = PlannedRow(run, config, cluster, places, estimate)
        yield row
        if row.surely_fits:
            return


def _splits(rows: Sequence[PlannedRow], order: Sequence[str]) -> tuple[list[list[PlannedRow]], dict[Split, list[str]]]:
    """Return the forms of each split, the best first, and the recipes that split in the same way."""
    by_split: dict[Split, list[PlannedRow]] = {}
    # A larger micro-batch has larger products. So it comes first where the estimate does not tell.
    for row in sorted(rows, key=lambda row: (row.estimate, -row.run.batch.micro_batch_size)):
        by_split.setdefault(row.split, []).append(row)
    also: dict[Split, list[str]] = {}
    kinds: dict[object, Split] = {}
    splits = []
    for split, forms in sorted(by_split.items(), key=lambda item: (item[1][0].estimate, order.index(item[0][0]))):
        first = forms[0]
        kind = (f"{first.estimate:.6g}", first.places.on_device, first.detail, *split[1:])
        if not first.cluster.is_cpu and kind in kinds:
            also.setdefault(kinds[kind], []).append(split[0])
        else:
            kinds[kind] = split
            splits.append(forms)
    return splits, also


# How data ranks hold the weights: these gather them for every micro-batch. Others exchange gradients once a step.
GATHERS = ("rows", "chunks")
# Products that selective checkpointing spares have kernels around them, which it does not.
SELECTIVE = 1.05
# Passes over the activations take about as long, on top of products.
PASSES = 1.15


def estimated_seconds(run: Run, config: RecipeConfig, places: Places, costs: Costs) -> float:
    """Return how long a step lasts at least: what is computed, and what nothing of it can hide.

    places: the bound of its memory.
    """
    batch, gpt, tp, cp, pp = run.batch, run.gpt, run.tp_size, run.cp_size, run.pp_size
    mode, size = run.config.activation_checkpointing, 4 if run.config.precision == "fp32" else 2
    precision = "tf32" if size == 4 else run.config.precision
    tokens, n = batch.micro_batch_size * run.rank_seq_len, batch.grad_accum_steps
    sizes = (tokens, 4 * gpt.n_embd // tp, gpt.n_embd, 1)
    flops = 2.0 * tokens * sizes[1] * gpt.n_embd
    # How fast a product of these sizes is stands for all.
    rate = flops / costs.seconds(Work(0.0, "product", 0, "mm", flops, 0.0, precision, sizes))
    each = tokens * hardware_flops_per_token(gpt, run.seq_len, mode) / tp / pp / rate * PASSES
    each *= SELECTIVE if mode == "selective" else 1.0
    if tp > 1:
        # Twice in forward and twice in backward, and twice more where a forward is computed again.
        turns, nbytes = (6 if mode == "full" else 4) * gpt.n_layer / pp, tokens * gpt.n_embd * size
        each += turns * costs.seconds(Work(0.0, "collective", 0, "all-reduce", nbytes=nbytes, ranks=tp, on_node=tp))
    if cp > 1:
        # Messages of a ring hide behind attention, but for their start.
        kinds = (3 * (cp - 1), "send", 0), (8, "all-to-all", tokens * gpt.attention_width * size)
        turns, name, nbytes = kinds[getattr(config, "cp_style", "") == "ulysses"]
        near = min(cp, costs.per_node)
        # The ring is as slow as its message to another machine, if there is one.
        message = Work(0.0, "collective", 0, name, nbytes=nbytes, sizes=(0, cp - 1, 0, 0), ranks=cp, on_node=near)
        each += turns * gpt.n_layer * costs.seconds(message)
    held, dp = gpt.n_params / tp / pp, batch.dp_size * cp
    nodes = max(1, run.world.world_size // costs.per_node)
    on_node = max(1, min(dp, costs.per_node // tp // (pp if nodes == 1 else 1)))

    def exchange(name: str, nbytes: float) -> float:
        return costs.seconds(Work(0.0, "collective", 0, name, nbytes=nbytes, ranks=dp, on_node=on_node))

    once = 0.0
    cut = getattr(config, "data_parallel", getattr(config, "strategy", "")) in ("fsdp", "fully_shard")
    if dp > 1 and (cut or get(run.recipe).memory in GATHERS or getattr(config, "stage", 0) == 3):
        gathers = 2 if getattr(config, "reshard_after_forward", True) else 1
        each = max(each, gathers * exchange("all-gather", size * held) + exchange("reduce-scatter", 4 * held))
    elif dp > 1:
        # All but the last backward has nothing to hide it.
        once = max(0.0, exchange("all-reduce", 4 * held) - 2 / 3 * each)
    if config.offload != "none":
        once += costs.seconds(Work(0.0, "host", 0, "optimizer", nbytes=30.0 * held / max(1, dp)))
        once += 2 * costs.seconds(Work(0.0, "copy", 0, "host to device", nbytes=size * held / max(1, dp)))
    if places.disk:
        once += sum(costs.seconds(Work(0.0, "disk", 0, way, nbytes=places.disk)) for way in ("read", "write"))
    stages = getattr(config, "stages_per_rank", 0) or getattr(config, "chunks", 0) or 1
    bubble = (pp - 1) / stages / (3 if getattr(config, "schedule", "") in SPLIT_BACKWARD else 1)
    return (n + bubble) * each + once
