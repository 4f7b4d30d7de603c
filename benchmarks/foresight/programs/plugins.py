"""The model of tests/foresight/prove/programs/train.py, split by Colossal-AI or by fairscale's FSDP.

    gptscale prove --reference "PYTHON train.py --batch 8" --candidate "PYTHON -m torch.distributed.run --nproc-per-node 2 \\
        plugins.py --batch 4 --engine TorchDDP"

PYTHON is that of .venv-colossalai for TorchDDP, LowLevelZero and Gemini. FSDP needs `--device cuda` in both commands: it makes
streams, for which prove has others.
"""

import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader, DistributedSampler

sys.path.insert(0, str(Path(__file__).parents[3] / "tests/foresight/prove/programs"))
from train import loss_of, make, optimizers_of, options

args = options()
model, dataset = make(args)
if args.engine == "FSDP":
    from fairscale.nn.data_parallel import FullyShardedDataParallel

    torch.distributed.init_process_group("nccl")
    model = FullyShardedDataParallel(model, compute_device=torch.device(args.device))
    (optimizer,) = optimizers_of(args, model)
else:
    import colossalai
    from colossalai.booster import Booster, plugin

    colossalai.launch_from_torch(backend="gloo")
    booster = Booster(plugin=getattr(plugin, f"{args.engine}Plugin")())
    model, optimizer, *_ = booster.boost(model, *optimizers_of(args, model))
sampler: DistributedSampler[int] = DistributedSampler(dataset, seed=1)
for _, (inputs, targets) in zip(range(args.steps), DataLoader(dataset, args.batch, sampler=sampler), strict=False):
    loss = loss_of(args, model(inputs.to(args.device)), targets.to(args.device), 1)
    loss.backward() if args.engine == "FSDP" else booster.backward(loss, optimizer)
    optimizer.step()
    optimizer.zero_grad()
