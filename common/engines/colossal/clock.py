"""The timing of Colossal-AI's pipeline: when a stage runs its schedule's forward_step and backward_step."""

from __future__ import annotations

from typing import Any

from gptscale.common.measure.bubble import BACKWARD, FORWARD, StageClock


def time_schedule(schedule: Any, clock: StageClock) -> None:
    """Let `clock` time the computations of a OneForwardOneBackwardSchedule or InterleavedSchedule in training."""
    for kind, method in ((FORWARD, "forward_step"), (BACKWARD, "backward_step")):
        setattr(schedule, method, TimedMethod(schedule, clock, kind, getattr(schedule, method)))


class TimedMethod:
    """A method `compute` of a schedule, timed. The order of the calls tells the stage and the micro-batch of each."""

    def __init__(self, schedule: Any, clock: StageClock, kind: str, compute: Any) -> None:
        self.schedule, self.clock, self.kind, self.compute = schedule, clock, kind, compute
        # The model chunk of each call in this step.
        self.chunks: list[int] = []

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Call the method and time it, unless the schedule only evaluates."""
        if self.schedule.forward_only:
            return self.compute(*arguments, **options)
        manager = self.schedule.stage_manager
        if len(self.chunks) == self._calls_per_step():
            self.chunks.clear()
        chunk = 0
        if manager.is_interleave:
            chunk = self.schedule.get_model_chunk_id(len(self.chunks), is_forward=self.kind == FORWARD)
        micro_batch = self.chunks.count(chunk)
        self.chunks.append(chunk)
        with self.clock.computing(self.kind, chunk * manager.num_stages + manager.stage, micro_batch):
            return self.compute(*arguments, **options)

    def _calls_per_step(self) -> int:
        manager = self.schedule.stage_manager
        micro_batches: int = self.schedule.num_microbatch if manager.is_interleave else self.schedule.num_microbatches
        return micro_batches * int(manager.num_model_chunks)
