"""Made-up runs in a results folder, for what compares them."""

from pathlib import Path
from typing import Any

from gptscale.common.settings.run import todays_workload, workload_hash
from gptscale.results.columns import STEP_COLUMNS, SUMMARY
from gptscale.results.record.files import append_row, write_json
from gptscale.results.record.step_log import StepLog

WORK = {"model": "tiny", "steps": 20, "lr": 5e-4, "data_fingerprint": "aaaa"}


def hash_of(work: dict[str, Any]) -> str:
    """Return the hash of a workload that a run of today recorded."""
    return workload_hash(todays_workload(work, {}))


ROW = {"status": "ok", "engine": "torch", "engine_version": "2.11.0", "torch_version": "2.11.0", "n_params": 842_624}
ROW |= {"seq_len": 128, "vocab_size": 257, "precision": "fp32", "tp_size": 1, "pp_size": 1, "micro_batch_size": 4}
ROW |= {"grad_accum_steps": 1, "global_batch_size": 8, "activation_checkpointing": "none", "compile": False}
ROW |= {"offload": "none", "data": "stdlib", "seed": 1234, "device": "cpu: somebody's"}


def add_run(
    out: Path,
    recipe: str,
    tokens_per_s: float = 1000.0,
    *,
    repeat: int = 0,
    jitter: float = 0.01,
    ran: bool = True,
    steps: bool = True,
    **changes: Any,
) -> str:
    """Add a run's row and its folder, as the launcher leaves them, and return its name. `work` changes what it trained."""
    run_id = changes.pop("run_id", f"{recipe}-{len(list(out.glob('runs/*')))}-{repeat}")
    work = WORK | changes.pop("work", {})
    n, step_s = changes.get("world_size", 1 if recipe == "single" else 2), 1024 / tokens_per_s
    measured = {"loss_first": 5.5, "loss_last": 3.0, "peak_rss_gib": 0.7, "step_time_s_median": step_s}
    measured |= {"step_time_s_p10": step_s * (1 - jitter), "step_time_s_p90": step_s * (1 + jitter)}
    measured |= {"tokens_per_s": tokens_per_s, "tokens_per_s_per_device": tokens_per_s / n}
    row = ROW | {"run_id": run_id, "timestamp": f"2026-01-01T00:00:{repeat:02d}Z", "recipe": recipe}
    row |= {"model": work["model"], "steps": work["steps"], "workload_hash": hash_of(work)}
    row |= {"world_size": n, "dp_size": n}
    append_row(SUMMARY, out, row | (measured if ran else {}) | changes)
    folder = out / "runs" / run_id
    folder.mkdir(parents=True, exist_ok=True)
    environment = {"python": "3.11.7", "device": row["device"], "packages": {"torch": "2.11.0"}}
    start = {"workload": work, "recipe_config": {"stage": 2}, "command": ["gptscale", "run", recipe]}
    write_json(folder / "run.json", start | {"environment": environment})
    if ran and steps:
        log = StepLog(folder / "steps.csv")
        for step in range(1, 21):
            log.append({**dict.fromkeys(STEP_COLUMNS, 0.1), "step": step, "loss": 3 + 5 / step})
        log.close()
    return run_id
