"""Options that need another one: refused where they would be ignored, and left out of the words of a run."""

import pytest

from benchmarks.memory.__main__ import MemoryLadderOptions
from gptscale.common.errors import ConfigError
from gptscale.common.settings.command_line import changed_options, parse
from gptscale.common.settings.needs import ignored
from gptscale.common.settings.run_config import RunConfig
from gptscale.launchers.commands.tokenize_text import TokenizeOptions
from gptscale.lenet.run.config import VisionConfig
from gptscale.lenet.studies.precision import PrecisionOptions
from gptscale.lenet.studies.workers import WorkersOptions
from gptscale.recipes.colossal_data import ColossalGeminiConfig
from gptscale.recipes.colossal_hybrid import ColossalPipelineConfig
from tools.trace_pipeline import RunAndTraceOptions

# Each is refused, and accepted with the words behind "|", which its error names.
REFUSED = [
    (RunConfig, "--beta1 0.9 --optimizer sgd | --optimizer adamw"),
    (RunConfig, "--beta2=0.99 --optimizer sgd | --optimizer adamw"),
    (RunConfig, "--min-lr-ratio 0.2 --lr-schedule constant | --lr-schedule cosine"),
    (RunConfig, "--tokenizer bytes --data synthetic | --data stdlib"),
    (RunConfig, "--tokenizer gpt2 --data tokens.bin | --data stdlib"),
    (RunConfig, "--eval-batches 4 | --eval-every 10"),
    (RunConfig, "--keep-checkpoints 3 | --save-last"),
    (RunConfig, "--trust-checkpoint | --resume PATH"),
    (RunConfig, "--allow_data_change | --resume PATH"),
    (VisionConfig, "--momentum 0.9 | --optimizer sgd"),
    (VisionConfig, "--data-dir data | --data mnist"),
    (VisionConfig, "--keep-checkpoints 2 | --save-every 1"),
    (VisionConfig, "--operators custom --model pure_linear | --model lenet"),
    (VisionConfig, "--batch-norm sync | --model cnn"),
    (WorkersOptions, "--data-dir x | --data mnist"),
    (PrecisionOptions, "--loss-scale 2 --modes fp32 | --modes fp16-fixed"),
    (ColossalPipelineConfig, "--num-model-chunks 2 | --schedule interleaved"),
    (ColossalGeminiConfig, "--offload-param-frac 0.5 | --offload-optim-frac 1"),
    (TokenizeOptions, "--eval-fraction 0.1 a.txt --out a.bin | --eval-out FILE.bin"),
]


@pytest.mark.parametrize(
    ("kind", "case"), REFUSED, ids=[case.partition(" ")[0] + " of " + k.__name__ for k, case in REFUSED]
)
def test_an_option_without_effect_is_refused_with_its_default_too(kind, case):
    words, remedy = (part.split() for part in case.split("|"))
    with pytest.raises(ConfigError) as error:
        parse(kind, words, prog="gptscale")
    option = words[0].partition("=")[0].replace("_", "-")
    assert error.value.where == f"in {option}"
    assert error.value.fix.startswith("leave it out, or ")
    assert error.value.fix.endswith(" ".join(remedy))
    assert "{" not in error.value.what
    parse(kind, [*words, *remedy], prog="gptscale")


def test_what_never_has_an_effect():
    with pytest.raises(ConfigError, match="leaves no run, in --steps, leave it out"):
        parse(RunAndTraceOptions, ["--steps", "50"], prog="python -m tools.trace_pipeline")
    said = "a dry run tries no batch, in --minutes, leave it out, or leave --dry-run out"
    with pytest.raises(ConfigError, match=said):
        parse(MemoryLadderOptions, ["--dry-run", "--minutes", "3"], prog="python -m benchmarks.memory")


def test_words_of_a_run_leave_out_what_has_no_effect():
    """Code may set what a command line may not, as a study gives every run its --data-dir."""
    config = RunConfig(optimizer="sgd", beta1=0.5, eval_batches=2, steps=7)
    assert ignored(config) >= {"beta1", "eval_batches"}
    words = changed_options(config, RunConfig())
    assert words == ["--steps", "7", "--optimizer", "sgd"]
    assert parse(RunConfig, words, prog="gptscale") == RunConfig(optimizer="sgd", steps=7)
