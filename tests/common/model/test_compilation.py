"""Compiled blocks: one graph for all, the modes that are refused, and the steps that CUDA graphs need to know of."""

import dataclasses
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._inductor.runtime import runtime_utils

from gptscale.common.engine import Batch
from gptscale.common.errors import ConfigError
from gptscale.common.model import compilation
from gptscale.common.model.compilation import apply_compile, cache_folder, check_cache, check_compile
from gptscale.common.settings.batch_plan import plan_batch
from gptscale.common.settings.families import preset
from gptscale.recipes.single import SingleConfig, build

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
# A step of two micro-batches.
TWICE = plan_batch(1, global_batch_size=4, grad_accum_steps=2)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("model", ["tiny", "qwen3-tiny"])
def test_compile_makes_one_graph_for_all_blocks_and_the_same_numbers(model, ids, random_model):
    """Three blocks of one shape are compiled once. Forward and backward agree with eager to rounding."""
    config = dataclasses.replace(preset(model), n_layer=3, n_embd=64, vocab_size=301)
    plain, compiled = random_model(config), random_model(config)
    apply_compile(compiled.blocks)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    losses = []
    for model in (plain, compiled):
        loss = model(ids[:, :-1], ids[:, 1:])
        loss.backward()
        losses.append(loss.detach())
    torch.testing.assert_close(*losses, rtol=1e-5, atol=0)
    for p, q in zip(plain.parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-3, atol=1e-5 * float(p.grad.abs().max()))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    torch._dynamo.reset()


@pytest.mark.promise("X8")
def test_a_compile_cache_that_others_own_or_may_write_is_refused(tmp_path, monkeypatch, run_on):
    """By default it is a folder of a known name in /tmp, and what lies there is loaded and run."""
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    assert str(cache_folder()) == runtime_utils.default_cache_dir()
    variables = {"TORCHINDUCTOR_CACHE_DIR": tmp_path / "torch", "TRITON_CACHE_DIR": tmp_path / "triton"}
    for variable, cache in variables.items():
        monkeypatch.setenv(variable, str(cache))
    assert str(cache_folder()) == runtime_utils.cache_dir() == str(tmp_path / "torch")
    (tmp_path / "torch").rmdir()
    run = run_on(CPU, compile=True)
    check_compile(run)
    for variable, cache in variables.items():
        assert stat.S_IMODE(cache.stat().st_mode) == 0o700
        (cache / "ab" / "cd").mkdir(parents=True)
        code = cache / "ab" / "cd" / "code.py"
        code.touch(0o777)
        others = [(level, "may be") for level in (cache, cache / "ab", code)]
        for level, what in (*others, (tmp_path, "in .*, set " + variable)):
            level.chmod(0o777)
            with pytest.raises(ConfigError, match=f"{level}.* {what}"):
                check_cache(cache, variable)
            level.chmod(0o755)
    with pytest.raises(ConfigError, match=f"torch cannot keep compiled code .*, set {variable} to a folder"):
        check_cache(code, variable)


def test_modes_of_compilation_that_mean_nothing_are_refused(run_on):
    with pytest.raises(ConfigError, match="without compile means nothing, in --compile-mode, add --compile"):
        check_compile(run_on(CUDA, compile_mode="max-autotune"))
    with pytest.raises(ConfigError, match="compile_mode reduce-overhead needs CUDA"):
        check_compile(run_on(CPU, compile_mode="reduce-overhead", compile=True))
    check_compile(run_on(CUDA, compile_mode="reduce-overhead", compile=True))
    check_compile(run_on(CPU, compile_mode="max-autotune-no-cudagraphs", compile=True))
    check_compile(run_on(CPU))


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_the_mode_reaches_the_compiler_and_graphs_are_told_of_steps(mode, monkeypatch, run_on):
    """Once before an optimizer step, whatever it accumulates, and once before each micro-batch of an evaluation."""
    modes, begun = [], []
    monkeypatch.setattr(torch, "compile", lambda function, *, fullgraph, dynamic, mode: modes.append(mode) or function)
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: begun.append(len(begun)))
    run = run_on(CPU, TWICE, model="tiny", n_layer=2, seq_len=16, compile=True, compile_mode=mode)
    engine = build(run, SingleConfig())
    ids = torch.randint(0, 257, (4, 17))
    assert engine.train_step(Batch(0, ids[:, :-1], ids[:, 1:]), 1e-3).loss.isfinite()
    told = len(begun)
    engine.eval_loss(Batch(0, ids[:, :-1], ids[:, 1:]))
    assert modes == [mode] * 2
    assert (told, len(begun)) == ((1, 3) if mode == "reduce-overhead" else (0, 0))


@pytest.mark.gpu
@pytest.mark.timeout(400)
@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
def test_cuda_graphs_train_as_the_same_kernels_do_without(checkpointing, run_on):
    """Accumulating over two micro-batches, with an evaluation between steps."""
    ids = torch.randint(0, 257, (6, 4, 129), generator=torch.Generator().manual_seed(0)).cuda()
    found = []
    for mode in ("default", "reduce-overhead"):
        torch._dynamo.reset()
        options = {"model": "tiny", "compile": True, "compile_mode": mode, "activation_checkpointing": checkpointing}
        run = run_on(CUDA, TWICE, **options)
        engine, losses = build(run, SingleConfig()), []
        for step, some in enumerate(ids):
            batch = Batch(step, some[:, :-1], some[:, 1:])
            result = engine.train_step(batch, 1e-3)
            losses += [result.loss.item(), result.grad_norm.item(), engine.eval_loss(batch).item()]
        found.append(losses)
    assert found[1] == pytest.approx(found[0], rel=1e-5)


@pytest.mark.slow
def test_instruction_sets_are_tried_with_one_library_of_torch(monkeypatch):
    """A new Python tries them, as torch does. Where the library does not load, torch's own way is taken."""
    cpu_vec_isa = pytest.importorskip("torch._inductor.cpu_vec_isa")
    monkeypatch.setattr(cpu_vec_isa.VecISA, "_avx_py_load", "")
    compilation.try_instruction_sets_without_torch()
    said = "\nimport sys; print('torch' in sys.modules)"
    here = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    for library, ended in ((here, (0, "False\n")), ("/no.so", (1, ""))):
        words = [sys.executable, "-c", cpu_vec_isa.VecISA._avx_py_load.replace("__lib_path__", str(library)) + said]
        tried = subprocess.run(words, capture_output=True, text=True, timeout=400, check=False)
        assert (tried.returncode, tried.stdout) == ended
