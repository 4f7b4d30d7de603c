"""Pipeline parallelism: the plan of stages, the stages, the engine."""
