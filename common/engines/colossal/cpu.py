"""What Colossal-AI 0.5.0 lacks on a machine without a GPU: its tensor and pipeline parallelism run on CPU and gloo with this.

Applied by start.py beside it when, and only when, the run is on the CPU. Each entry names what asks for it; all paths are
below `colossalai/`. LowLevelZero and Gemini ask for a GPU in many more places and are not run on the CPU.
"""

from __future__ import annotations

from typing import Any

import torch


def adapt() -> None:
    """Give Colossal-AI's CPU accelerator the calls that it raises RuntimeError for, and torch.cuda.set_device a CPU."""
    from colossalai.accelerator import set_accelerator
    from colossalai.accelerator.cpu_accelerator import CpuAccelerator

    class Cpu(CpuAccelerator):  # type: ignore[misc]
        """The CPU accelerator with the calls that training makes."""

        def manual_seed(self, seed: int) -> None:
            """Asked for by shardformer/layer/utils.py, Randomizer.__init__ (every parallel layer makes one)."""
            torch.manual_seed(seed)

        def get_rng_state(self, device: Any = None) -> torch.Tensor:
            """As above; upstream passes a device on to torch.get_rng_state, which takes none."""
            return torch.get_rng_state()

        def synchronize(self, device: Any = None) -> None:
            """Asked for by utils/common.py and the profilers; there is nothing to wait for."""

        def set_device(self, device: Any = None) -> None:
            """Asked for by initialize.py and the plugins; there is one CPU."""

    set_accelerator(Cpu())
    # shardformer/modeling/gpt2.py, gpt2_model_forward: `torch.cuda.set_device(hidden_states.device)` before every block.
    set_cuda_device = torch.cuda.set_device

    def set_device(device: Any) -> None:
        if torch.device(device).type == "cuda":
            set_cuda_device(device)

    torch.cuda.set_device = set_device
