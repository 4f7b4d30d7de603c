"""Run as ranks: what this rank holds in each case, found by looking at every live tensor, not by asking the engine.

usage: world_bytes.py OUT 'RECIPE [option...]'...; writes OUT/rank<N>.json: {case: {what: bytes}}
"""

import gc
import json
import sys
import time
from pathlib import Path

import torch
from world_engine import end_well, engine_and_batches, planned

from gptscale.common.engines.rank_shapes import state_formula
from gptscale.common.engines.zero.swap_folder import nbytes_under
from gptscale.common.process.begin import keep_freed_memory
from gptscale.common.process.world import World, process_group


def live_bytes(model):
    """Bytes of the distinct storages of all tensors alive, gradients included."""
    gc.collect()
    storages = {}
    tensors = [o for o in gc.get_objects() if isinstance(o, torch.Tensor)]
    tensors += [p.grad for p in model.parameters() if p.grad is not None]
    for tensor in tensors:
        tensor = getattr(tensor, "_local_tensor", tensor)
        if tensor.device.type != "meta":
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(storages.values())


def settled_bytes(model):
    """Bytes alive when gloo's threads have let go of what they sent, which takes them a moment on a busy machine."""
    fewest = live_bytes(model)
    for _ in range(5):
        time.sleep(0.05)
        fewest = min(fewest, live_bytes(model))
    return fewest


def measure(out, recipe, *options):
    with planned(recipe, out, "--global-batch-size", "8", "--grad-accum-steps", "2", *options) as plan:
        before = live_bytes(torch.nn.Module())
        engine, batches = engine_and_batches(plan)
        batch = batches.batch(0)
        engine.train_step(batch, 1e-3)
        engine.train_step(batch, 1e-3)
        built = live_bytes(engine.model) - before
        # the same, but stopped where gradients are whole: between backward and step
        held, calls, stepper, hold_back = {}, [], engine.optimizer, getattr(engine, "set_grad_sync", None)

        def second_micro_batch(on):
            calls.append(on)
            if len(calls) == 2:
                held["between"] = settled_bytes(engine.model) - before
            hold_back(on)

        if hold_back:
            engine.set_grad_sync = second_micro_batch
        stepper.step = lambda lr, loss: held.update(live_bytes=settled_bytes(engine.model) - before) or loss
        engine.train_step(batch, 1e-3)
        found = {"built": built, "between": held.get("between"), "with_gradients": held["live_bytes"]}
        found["n"] = plan.run.gpt.n_params_in_memory
        state = engine.live_state()
        found["live"] = {"host": state.host, "disk": state.disk, "total": state.total}
        found["formula"] = state_formula(plan.run, plan.recipe_config)
        found["state"] = sum(s.tensor.nbytes for s in engine.state())
        torch.distributed.barrier()
        found["disk"] = nbytes_under(out)
        torch.distributed.barrier()
        engine.close()
        return found


def main(out, cases):
    # As in a run: otherwise each step has the kernel map and zero the large tensors anew.
    keep_freed_memory()
    world = World.from_environment("auto")
    with process_group(world):
        found = {case: measure(out, *case.split()) for case in cases}
    (out / f"rank{world.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
    end_well()
