"""A verdict names the cause that was put into a trace, sizes it, and says nothing where nothing is wrong."""

import json
from dataclasses import replace

import pytest
from made_traces import FACTS, HEALTHY, Part, evidence_of, trace

from gptscale.common.errors import ConfigError
from gptscale.common.measure.evidence import EVIDENCE, RANKS_MAX, RankEvidence, RunEvidence, RunFacts, judged_ranks
from gptscale.common.measure.limits import TAKEN_MAX
from gptscale.common.settings.command_line import parse
from gptscale.foresight.commands import why
from gptscale.foresight.verdict import of_run
from gptscale.foresight.verdict.causes import CAUSES, WORDS
from gptscale.foresight.verdict.files import read_verdict, write_verdict
from gptscale.foresight.verdict.judge import SizedCause, judge, named
from gptscale.foresight.verdict.of_run import read_evidence
from gptscale.launchers.run.options import parse_run
from gptscale.launchers.run.verdict import tell_verdict
from gptscale.lenet.run.config import VisionConfig

LATE, LINKS = "communication-bound (late rank)", "communication-bound (links)"


def verdict_on(*ranks, host=0.0, processor=1.0, **options):
    return judge(evidence_of([trace(*rank, host, processor=processor) for rank in enumerate(ranks)], **options))


WAITING = [*HEALTHY, Part("optimizer", True, 0.04)]
INJECTED = {
    "data-bound": ([[Part("data", False, 0.05), *HEALTHY]] * 2, {}, 51 / 146),
    "launch-bound": ([HEALTHY] * 2, {"host": 0.5}, 47.5 / 96),
    LINKS: ([WAITING] * 2, {}, 40 / 136),
    # Rank 1 computes 0.07 s longer, rank 0 waits so long, and the transfer takes no time.
    LATE: ([[*HEALTHY, Part("backward", True, 0.07)], [*HEALTHY, Part("backward", False, 0.07)]], {}, 70 / 166),
    "bubble-bound": (
        # Two stages and two micro-batches: each waits while the other computes.
        [
            [Part("forward", False, 0.04), Part("forward", True, 0.04), Part("backward", False, 0.04)],
            [Part("forward", True, 0.04), Part("forward", False, 0.04), Part("backward", True, 0.04)],
        ],
        {"facts": replace(FACTS, recipe="pipeline", pipeline=True)},
        None,
    ),
    "offload-bound (disk)": ([[*HEALTHY, Part("disk", False, 0.096)]], {}, 0.5),
    "offload-bound (bus)": ([[*HEALTHY, Part("bus", False, 0.096)]], {}, 0.5),
    "memory-pressed": ([[*HEALTHY, Part("allocator", False, 0.032)]], {}, 0.25),
    "contended": ([HEALTHY] * 2, {"taken": 0.4, "processor": 0.6}, 0.4 * 95 / 96),
    "thread-bound": ([HEALTHY], {"right_threads_s": 0.048}, 0.5),
}
SHORT = {"forward": 0.4, "backward": 0.4}
NAMED = [(word, *injected) for word, injected in INJECTED.items()] + [
    # Waits in the timed steps count. The reader got ahead in the pause, so that the traced steps wait for nothing.
    ("data-bound", [HEALTHY] * 2, {"data_wait_s": [0.001, 0.096]}, 0.5),
    # Short products are slow for their size, and so are exchanges, without any cost of a host.
    ("launch-bound", [HEALTHY] * 2, {"host": 0.3, "fixed": SHORT}, None),
    ("compute-bound", [HEALTHY] * 2, {"host": 0.02, "fixed": SHORT}, None),
    # The host of a compiled run cannot be seen.
    ("compute-bound", [HEALTHY] * 2, {"host": 0.5, "facts": replace(FACTS, compiled=True)}, None),
    # A gain below the spread of the steps is none.
    ("compute-bound", INJECTED["data-bound"][0], {"step_times_s": [0.05 + 0.01 * i for i in range(30)]}, None),
    # A rank may be late in the traced steps alone.
    ("compute-bound", INJECTED[LATE][0], {"late": (1, 1.02)}, None),
    (LATE, INJECTED[LATE][0], {"late": (1, 1.74)}, None),
]


def test_each_cause_is_injected():
    assert {*INJECTED} == {cause.word for cause in CAUSES}


@pytest.mark.parametrize(("word", "ranks", "options", "gain"), NAMED)
def test_a_cause_is_named_and_sized(word, ranks, options, gain):
    verdict = verdict_on(*ranks, **options)
    assert verdict.bound_by == word, verdict.line()
    assert (verdict.cause is None) == (word == "compute-bound")
    if gain is not None:
        assert verdict.gain(verdict.cause) == pytest.approx(gain, abs=0.01)
    assert sum(verdict.shares.values()) == pytest.approx(1.0)
    assert verdict.late_rank == (1 if word == LATE else None)
    assert verdict.line().startswith(word)
    assert verdict.columns()["bound_by"] == word


def test_a_pipeline_of_single_sequences_gains_what_micro_batches_leave():
    ranks, _, _ = INJECTED["bubble-bound"]
    facts = RunFacts("pipeline", pipeline=True, micro_batch_size=1, grad_accum_steps=2)
    verdict = verdict_on(*ranks, facts=facts)
    assert verdict.remedy == "try --grad-accum-steps 8"
    # The bubble is 0.04 of 0.12 s, and a quarter of it remains for as many tokens.
    assert verdict.remedied_s == pytest.approx(0.08 + 0.04 / 4)


def test_a_healthy_run_has_no_cause():
    verdict = verdict_on(HEALTHY, HEALTHY, taken=TAKEN_MAX)
    assert (verdict.bound_by, verdict.cause) == ("compute-bound", None)
    assert verdict.shares["products"] == pytest.approx(0.7 * 95 / 96)
    assert verdict.columns() == {"bound_by": "compute-bound"}


def test_exchanges_of_each_micro_batch_are_not_helped_by_more_of_them():
    remedy = WORDS[LINKS].remedy
    assert remedy(replace(FACTS, recipe="zero2")) == "try --micro-batch-size 8 --grad-accum-steps 1"
    assert remedy(RunFacts("zero3", micro_batch_size=4)) == "try --micro-batch-size 8"
    assert remedy(FACTS) == "try --micro-batch-size 2 --grad-accum-steps 8"


@pytest.mark.parametrize(("processors", "step_s"), [({0, 1}, 0.096), ({0}, 0.190), (set(), 0.096)])
def test_ranks_that_share_processors_are_promised_no_more_than_those(processors, step_s):
    """Each of two ranks computes for 0.095 s. With one processor for both a step without transfers is twice as long."""
    slow = [*HEALTHY, Part("optimizer", True, 0.2)]
    traces = [replace(trace(rank, slow), processors=frozenset(processors)) for rank in range(2)]
    verdict = judge(evidence_of(traces))
    assert verdict.bound_by == LINKS
    assert verdict.cause
    assert verdict.cause.without_s == pytest.approx(step_s)


def test_a_late_rank_beside_another_program_is_the_late_rank():
    """Rank 1 has half a processor, so that rank 0 waits for it. It is as fast as rank 0 with a whole one."""
    half = [p if p.part == "data" else p._replace(seconds=2 * p.seconds) for p in HEALTHY]
    traces = [trace(0, [*HEALTHY, Part("optimizer", True, 0.095)]), trace(1, half, processor=0.5)]
    verdict = judge(evidence_of(traces, taken=0.25, late=(1, 2.0)))
    assert (verdict.bound_by, verdict.late_rank) == (LATE, 1)
    assert verdict.cause
    assert verdict.cause.without_s == pytest.approx(0.096)
    assert verdict.shares["no processor"] == pytest.approx(95 / 191)


def test_contention_among_a_ranks_own_threads_is_not_others_contention():
    verdict = verdict_on(HEALTHY, HEALTHY, processor=0.3, taken=0.1, right_threads_s=0.048)
    assert verdict.bound_by == "thread-bound"
    (contended,) = [cause for cause in verdict.causes if cause.name == "contended"]
    assert verdict.gain(contended) == pytest.approx(0.1)


def options_of_remedies(kinds):
    """Yield the options that remedies name for runs of these kinds. Only a pipeline has a bubble."""
    causes = [
        (cause, facts) for cause in WORDS.values() for facts in kinds if facts.pipeline or "bubble" not in cause.word
    ]
    for remedy in {cause.remedy(facts) for cause, facts in causes}:
        if remedy.startswith("try --"):
            yield remedy.split()[1:]


@pytest.mark.parametrize("recipe", "ddp fsdp zero2 tensor_parallel pipeline hybrid_3d".split())
def test_every_remedy_is_made_of_options_that_exist(recipe):
    base = replace(FACTS, recipe=recipe, pipeline=recipe in ("pipeline", "hybrid_3d"))
    kinds = (base, replace(base, grad_accum_steps=1), replace(base, cuda=True, micro_batch_size=1))
    for options in options_of_remedies(kinds):
        parse_run(recipe, options)


def test_every_remedy_of_a_vision_run_is_made_of_options_that_exist():
    for options in options_of_remedies([RunFacts(""), RunFacts("", slow_loader=True, micro_batch_size=8)]):
        parse(VisionConfig, ["--loader", "dataloader", *options], prog="lenet run", about="")


def test_why_explains_a_verdict(tmp_path, capsys):
    ranks, _, _ = INJECTED[LATE]
    verdict = verdict_on(*ranks, taken=0.02)
    write_verdict(tmp_path, verdict)
    assert read_verdict(tmp_path) == verdict
    assert why.main([str(tmp_path), "--png", str(tmp_path / "why.png")]) == 0
    out = capsys.readouterr().out
    assert out.startswith("communication-bound (late rank), rank 1: a step of 166 ms would take 96 without it (-42%)")
    assert "products" in out
    assert "others took 2.0%" in out
    assert (tmp_path / "why.png").stat().st_size > 10_000


def test_of_a_large_world_some_ranks_are_judged_and_the_slowest_among_them():
    late = [*HEALTHY, Part("backward", False, 0.07)]
    waiting = [*HEALTHY, Part("backward", True, 0.07)]
    evidence = [RankEvidence(trace(r, late if r == 101 else waiting), 0.001, None) for r in range(200)]
    verdict = judge(RunEvidence("summary.csv", FACTS, judged_ranks(evidence), [0.166] * 10))
    assert (verdict.bound_by, verdict.late_rank) == (LATE, 101)
    assert len(verdict.ranks) <= RANKS_MAX
    assert 150 in [e.trace.rank for e in judged_ranks(evidence, (150, 2.0))]


def evidence_of_a_run():
    exchange = ("all_reduce", (0, 1), 4096)
    parts = [*HEALTHY, Part("backward", True, 0.07, 0, exchange, 1)]
    ranks = [
        RankEvidence(replace(trace(r, parts), processors=frozenset({0, 3})), 0.001, 0.1, {"forward": 0.2})
        for r in (0, 1)
    ]
    return RunEvidence("lenet.csv", replace(FACTS, recipe=""), ranks, [0.166] * 10, 0.01, (1, 1.3), ["rank 0: hot"])


def test_evidence_comes_back_from_its_file_as_it_was(tmp_path):
    (tmp_path / EVIDENCE).write_bytes(evidence_of_a_run().as_json())
    assert read_evidence(tmp_path) == evidence_of_a_run()


DAMAGE = {
    "verdict.json": [
        {"bound_by": "haunted"}, {"step_s": -1}, {"causes": 3}, {"ranks": [["x"]]}, {"late_rank": "x"}, {"shares": {"data": "x"}}
    ],
    # No row outside of the results folder is touched.
    EVIDENCE: [
        {"ranks": []}, {"ranks": [{}]}, {"facts": {"ghost": 1}}, {"step_times_s": []}, {"summary": "../other/summary.csv"}
    ],
}  # fmt: skip
OTHER = {"format_version": 9}


@pytest.mark.parametrize(
    ("name", "change"), [(name, change) for name, changes in DAMAGE.items() for change in [{}, OTHER, *changes]]
)
def test_a_damaged_file_of_a_run_is_one_line(tmp_path, name, change):
    file, read = tmp_path / name, read_evidence if name == EVIDENCE else read_verdict
    write_verdict(tmp_path, verdict_on(HEALTHY, HEALTHY))
    (tmp_path / EVIDENCE).write_bytes(evidence_of_a_run().as_json())
    text = json.dumps(json.loads(file.read_text()) | change)
    file.write_text(text if change else text[:-9])
    with pytest.raises(ConfigError, match="has version 9, not 1" if change is OTHER else "is cut or damaged"):
        read(tmp_path)


def test_the_verdict_of_no_run_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match="has no verdict"):
        read_verdict(tmp_path)
    with pytest.raises(ConfigError, match="does not exist"):
        read_verdict(tmp_path / "gone")


def test_why_judges_a_run_that_no_launcher_judged_and_fills_its_row(tmp_path, capsys):
    folder, summary = tmp_path / "runs/r", tmp_path / "lenet.csv"
    folder.mkdir(parents=True)
    (folder / EVIDENCE).write_bytes(evidence_of_a_run().as_json())
    summary.write_text("version,run_id,bound_by,gain_if_removed\n1,r,,\n1,other,,\n")
    assert why.main([str(folder)]) == 0
    verdict = read_verdict(folder)
    assert verdict.notes == ["rank 0: hot"]
    assert capsys.readouterr().out.startswith(verdict.line())
    assert verdict.cause is not None
    row = f"1,r,{verdict.bound_by},{verdict.gain(verdict.cause)!r}"
    assert summary.read_text() == f"version,run_id,bound_by,gain_if_removed\n{row}\n1,other,,\n"
    # The second time it is read.
    (folder / EVIDENCE).write_text("")
    assert why.main([str(folder)]) == 0


def test_a_defect_of_the_lab_is_seen_and_ends_nothing(tmp_path, capsys, monkeypatch):
    tell_verdict(tmp_path)
    assert capsys.readouterr() == ("", "")
    (tmp_path / EVIDENCE).write_text("{")
    tell_verdict(tmp_path)
    (line,) = capsys.readouterr().err.splitlines()
    assert "has no verdict (its evidence.json is cut or damaged" in line
    monkeypatch.setattr(of_run, "judge_run", lambda folder: 1 / 0)
    tell_verdict(tmp_path)
    first, *_, last = capsys.readouterr().err.splitlines()
    assert first.startswith("Traceback")
    assert "has no verdict, by a defect of gptscale (ZeroDivisionError, see above)" in last


@pytest.mark.parametrize(
    ("without_s", "spread", "word"),
    [
        # Others on the machine slow one rank down, and nothing else.
        ({"contended": 0.7, LATE: 0.75}, 0.5, LATE),
        # Others slow all ranks down, one of them a little more.
        ({"contended": 0.5, LATE: 0.9}, 0.1, "contended"),
        # On a quiet machine the spread counts.
        ({LATE: 0.75}, 0.5, None),
        ({"thread-bound": 0.7, LINKS: 0.9}, 0.5, "thread-bound"),
        ({LINKS: 0.96}, 0.0, None),
        # The host's cost is a difference of two steps, each with its spread.
        ({"launch-bound": 0.85, LINKS: 0.88}, 0.11, LINKS),
        ({"launch-bound": 0.85, LINKS: 0.88}, 0.10, "launch-bound"),
    ],
)
def test_the_cause_that_is_named(without_s, spread, word):
    assert named([SizedCause(name, s, 0.1) for name, s in without_s.items()], 1.0, spread) == word
