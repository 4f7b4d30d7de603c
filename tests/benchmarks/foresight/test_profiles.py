"""A row of each kind of table: the step that its stack ran, and rows that cannot be described."""

import pytest

from benchmarks.foresight.tables.collectives import ALL_REDUCES, BANDWIDTHS, read_all_reduce, read_bandwidth
from benchmarks.foresight.tables.composer import COMPOSER
from benchmarks.foresight.tables.composer import read as read_composer
from benchmarks.foresight.tables.megatron_lm import MEGATRON_LM
from benchmarks.foresight.tables.megatron_lm import read as read_megatron
from benchmarks.foresight.tables.rows import CellsOfRow
from gptscale.foresight.time.operations import BlockShape, HeadShape

MIB = 2**20


def cells(**values):
    return CellsOfRow({title.replace("_", "-"): str(value) for title, value in values.items()}, "in line 2")


def operations(run):
    return {operation.kind: operation for operation in run.step.operations()}


@pytest.mark.parametrize("gpu", ["a100", "v100"])
def test_an_all_reduce_in_a_node_is_one_operation_on_its_gpus_links(gpu):
    row = {"gpu": gpu, "n_gpus": "4", "size_B": str(8 * MIB), "time_ns_out_of_place": "250000"}
    run = read_all_reduce(CellsOfRow(row, ""))
    (operation,) = run.step.operations()
    assert run.seconds == 250e-6
    assert (operation.kind, operation.shape.bytes, operation.shape.ranks, operation.shape.per_node) == (
        "all-reduce",
        8 * MIB,
        4,
        4,
    )
    assert operation.on in {link for _, link in ALL_REDUCES.places}
    unknown = read_all_reduce(CellsOfRow(row | {"gpu": "mi300"}, ""))
    assert (unknown.step, unknown.cannot) == (None, "links of 'mi300' are not known")


@pytest.mark.parametrize(("collective", "turns"), [("AllReduce", 2), ("AllGather", 1), ("ReduceScatter", 1)])
def test_a_bus_bandwidth_is_the_time_of_a_ring(collective, turns):
    """NCCL's tests: bus bandwidth = bytes x (n - 1)/n / time, and an all-reduce does that twice."""
    run = read_bandwidth(CellsOfRow({"collective": collective, "nodes_of_8": "2", "GB_per_s_mean": "100"}, ""))
    assert run.seconds == pytest.approx(turns * 15 / 16 * 256 * MIB / 100e9)
    (operation,) = run.step.operations()
    assert (operation.shape.ranks, operation.shape.per_node) == (16, 8)
    assert operation.on == BANDWIDTHS.places[0][1]
    assert (
        read_bandwidth(CellsOfRow({"collective": "Gossip", "nodes_of_8": "2", "GB_per_s_mean": "1"}, "")).step is None
    )


MPT = {
    "Model": "1b",
    "SeqLen (T)": "2048",
    "# GPUs": "16",
    "GPU": "a100_80gb",
    "MicroBatchSize": "4",
    "GradAccum": "2",
    "GlobalBatchSize": "128",
    "Throughput (T/s)": "131072",
    "Precision": "amp_bf16",
    "Sharding Strategy": "FULL_SHARD",
    "Activation Checkpointing": "True",
    "Activation CPUOffload": "False",
}


def test_a_row_of_llm_foundry_is_fsdp_of_its_model():
    run = read_composer(CellsOfRow(MPT, ""))
    # 128 sequences of 2048 tokens, of which each of 16 devices has an eighth of 16 a second.
    assert (run.seconds, run.tokens) == (2.0, 16384.0)
    assert run.group == "1b, 16 a100_80gb, T 2048"
    by_kind = operations(run)
    assert by_kind["block forward"].shape[:2] == (4 * 2048, 2048)
    places = {operation.on for operation in by_kind.values()}
    assert any(set(pair) >= places for pair in COMPOSER.places)


def test_rows_in_fp8_are_another_machine():
    h100 = MPT | {"GPU": "h100_80gb"}
    in_16, in_8 = (read_composer(CellsOfRow(h100 | {"Precision": p}, "")) for p in ("amp_bf16", "amp_fp8"))
    assert operations(in_16)["block forward"].on != operations(in_8)["block forward"].on


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"Model": "2b"}, "the model or the GPU is not known"),
        ({"GPU": "mi250"}, "the model or the GPU is not known"),
        ({"Sharding Strategy": "SHARD_GRAD_OP"}, "only FULL_SHARD without offload is described"),
        ({"Activation CPUOffload": "True"}, "only FULL_SHARD without offload is described"),
    ],
)
def test_what_composer_ran_otherwise_is_refused_with_the_reason(change, reason):
    run = read_composer(CellsOfRow(MPT | change, ""))
    assert (run.step, run.seconds, run.cannot) == (None, 2.0, reason)


GOLDEN = {
    "case": "gpt/gpt3_mcore",
    "machine": "dev_dgx_h100",
    "iteration_time_s_median": 0.5,
    "num_layers": 12,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "seq_length": 1024,
    "micro_batch_size": 4,
    "global_batch_size": 32,
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 2,
}


def megatron_row(**changes):
    row = cells(**(GOLDEN | changes))
    # These two titles have no dashes in the table.
    return CellsOfRow(
        {title.replace("iteration-time-s-median", "iteration_time_s_median"): v for title, v in row.cells.items()}, ""
    )


def test_a_golden_value_is_a_pipeline_over_what_eight_devices_leave():
    run = read_megatron(megatron_row())
    assert (run.seconds, run.noise) == (0.5, 0.1)
    # Two tensor ranks, two stages, and so two data ranks, with 32 / (2 x 4) micro-batches.
    assert len({item.rank for item in run.step.items}) == 2
    block = operations(run)["block forward"]
    shape = BlockShape(*block.shape)
    assert (shape.tokens, shape.hidden, shape.feed_forward, shape.heads, shape.tp) == (4096, 512, 2048, 8, 2)
    assert block.on in {device for device, _ in MEGATRON_LM.places}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"iteration_time_s_median": ""}, "no time was measured"),
        ({"num_experts": 8}, "num-experts is not described"),
        ({"fp8_format": "hybrid"}, "fp8-format is not described"),
        ({"case": "bert/bert_mcore"}, "it is no plain GPT on a known machine"),
        ({"machine": "dev_mi300"}, "it is no plain GPT on a known machine"),
        ({"seq_length": ""}, "it is no plain GPT on a known machine"),
        ({"context_parallel_size": 2}, "context parallelism is not described"),
        ({"global_batch_size": 33}, "the splits do not divide 8 devices, the layers or the batch"),
        ({"pipeline_model_parallel_size": 16}, "the splits do not divide 8 devices, the layers or the batch"),
        ({"num_layers": 13}, "the splits do not divide 8 devices, the layers or the batch"),
    ],
)
def test_a_golden_value_that_cannot_be_described_says_why(changes, reason):
    run = read_megatron(megatron_row(**changes))
    assert (run.step, run.cannot) == (None, reason)


@pytest.mark.parametrize(("changes", "vocabulary"), [({}, 51200), ({"vocab_size": 131072}, 131072)])
def test_the_head_has_the_vocabulary_of_the_row(changes, vocabulary):
    head = operations(read_megatron(megatron_row(**changes)))["head forward"]
    assert HeadShape(*head.shape).vocabulary == vocabulary


@pytest.mark.parametrize("unused", ["", "0", "false", "False"])
def test_a_feature_that_is_switched_off_is_none(unused):
    assert read_megatron(megatron_row(num_experts=unused)).step is not None
