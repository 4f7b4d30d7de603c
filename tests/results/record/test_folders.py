"""Which checkpoint --resume means, and which results folders a run may write into."""

import pytest

from gptscale.common.errors import CheckpointError, ConfigError
from gptscale.results.columns import SUMMARY
from gptscale.results.record.folders import check_results_folder, checkpoints_in, resume_folder


@pytest.fixture
def run(tmp_path):
    run = tmp_path / "runs" / "mine"
    (run / "checkpoints" / "step-4").mkdir(parents=True)
    (run / "checkpoints" / "step-4" / "manifest.json").touch()
    return run


def test_newest_and_auto_mean_the_run_of_that_name(run, tmp_path):
    assert resume_folder(tmp_path, "mine", "newest") == resume_folder(tmp_path, "mine", "auto") == run
    assert resume_folder(tmp_path, "mine", str(tmp_path)) == tmp_path
    with pytest.raises(CheckpointError, match="other is no folder"):
        resume_folder(tmp_path, "other", "newest")


def test_auto_begins_only_if_nothing_was_ever_saved(run, tmp_path):
    assert resume_folder(tmp_path, "other", "auto") is None
    (run / "checkpoints" / "step-4").rename(run / "checkpoints" / "step-4.corrupt")
    assert resume_folder(tmp_path, "mine", "auto") == run
    with pytest.raises(CheckpointError, match="holds no checkpoint, in --resume, run with --save-every 5 first"):
        checkpoints_in(run, "--save-every 5")


def test_a_run_its_checkpoints_and_one_of_them_may_be_named(run):
    checkpoints = run / "checkpoints"
    assert checkpoints_in(run, "") == checkpoints_in(checkpoints, "") == checkpoints
    assert checkpoints_in(checkpoints / "step-4", "") == checkpoints / "step-4"
    (checkpoints / "step-8").mkdir()
    with pytest.raises(CheckpointError, match=r"manifest.json is missing, in checkpoint .*step-8"):
        checkpoints_in(checkpoints / "step-8", "")


def test_a_name_that_is_taken_is_refused(run, tmp_path):
    def check(name, resumes=False):
        check_results_folder(tmp_path, name, SUMMARY, resumes=resumes)

    check("new")
    check("mine", resumes=True)
    with pytest.raises(ConfigError, match="run mine exists already"):
        check("mine")
