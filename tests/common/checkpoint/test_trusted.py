"""The list of hashes of pickles: exactly its files, unchanged, in a list that nobody else may write."""

import hashlib

import pytest

from gptscale.common.checkpoint.trusted import SUMS, check_sums
from gptscale.common.errors import CheckpointError


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "model.pt").write_bytes(b"weights")
    (tmp_path / SUMS).write_text(f"{hashlib.sha256(b'weights').hexdigest()}  model.pt\n")
    (tmp_path / SUMS).chmod(0o600)
    return tmp_path


HARM = {
    "no list": (lambda f: (f / SUMS).unlink(), "has no SHA256SUMS"),
    "a link": (lambda f: (f / SUMS).rename(f / "list") and (f / SUMS).symlink_to("list"), "has no SHA256SUMS"),
    "a list of others": (lambda f: (f / SUMS).chmod(0o666), "others can write"),
    "one file more": (lambda f: (f / "optim.pt").touch(), "'optim.pt' is not in SHA256SUMS"),
    "one file less": (lambda f: (f / "model.pt").unlink(), "'model.pt' is missing"),
    "another file": (lambda f: (f / "model.pt").write_bytes(b"Weights"), "'model.pt' does not match SHA256SUMS"),
}


@pytest.mark.parametrize("case", HARM)
def test_anything_else_than_the_listed_files_is_refused(case, folder):
    check_sums(folder)
    harm, message = HARM[case]
    harm(folder)
    with pytest.raises(CheckpointError, match=message) as error:
        check_sums(folder)
    assert f"cd {folder} && sha256sum * > SHA256SUMS" in error.value.fix
