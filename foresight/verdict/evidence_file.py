"""Read the evidence that a run left in its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gptscale.common.errors import ConfigError, visible
from gptscale.common.measure.evidence import EVIDENCE, FORMAT_VERSION, RankEvidence, RunEvidence, RunFacts
from gptscale.common.measure.exchanges import TracedExchange
from gptscale.common.measure.step_trace import RankTrace, TracedOperation
from gptscale.common.process.progress import StepMark
from gptscale.common.settings.user_file import read_json

BYTES_MAX = 2**30


def read_evidence(folder: Path) -> RunEvidence:
    """Read the evidence in a run's folder, or raise ConfigError if it is damaged."""
    where = f"in {visible(str(folder))}"

    def refuse(reason: str) -> ConfigError:
        return ConfigError(f"its {EVIDENCE} is cut or damaged ({reason})", where, "run again")

    content = read_json(folder / EVIDENCE, BYTES_MAX, refuse)
    try:
        version = content.pop("format_version")
        if version != FORMAT_VERSION:
            fix = "read it with the gptscale that wrote it, or run again"
            raise ConfigError(
                f"its {EVIDENCE} has version {visible(str(version)[:20])}, not {FORMAT_VERSION}", where, fix
            )
        late, ranks, facts = content["late"], content["ranks"], RunFacts(**content["facts"])
        known = [RankEvidence(**{**rank, "trace": _trace(rank["trace"])}) for rank in ranks]
        if not known or not content["step_times_s"] or Path(content["summary"]).name != content["summary"]:
            raise ValueError("it says nothing")
        return RunEvidence(**{**content, "late": late and tuple(late), "ranks": known, "facts": facts})
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise refuse(type(error).__name__) from None


def _trace(content: dict[str, Any]) -> RankTrace:
    rows = {"segments": StepMark, "profiled": StepMark, "operations": TracedOperation}
    exchanges = {
        name: [TracedExchange(kind, tuple(ranks), *others) for kind, ranks, *others in content[name]]
        for name in ("exchanges", "profiled_exchanges")
    }
    marks = {name: [kind(*row) for row in content[name]] for name, kind in rows.items()}
    return RankTrace(**{**content, **marks, **exchanges, "processors": frozenset(content["processors"])})
