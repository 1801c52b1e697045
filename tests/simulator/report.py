"""What a simulation prints."""

from datetime import datetime

from tests.simulator.simulation import SimulationResult


def format_result(result: SimulationResult, began_at: datetime, seconds: float) -> str:
    """Return the counts and the last line; for a violation also the last events of its credential."""
    lines = [f"{count:>10,} {what}" for what, count in sorted(result.counts.items())]
    lines.append(f"{(result.at - began_at).days} days in {seconds:.0f} s")
    violation = result.violation
    if violation is not None:
        lines += ["", f"seed {result.seed}, step {violation.step}, {violation.at:%Y-%m-%d %H:%M:%S}: {violation.what}"]
        lines += [f"  {event}" for event in violation.events]
    lines.append(f"{result.steps} steps, {0 if violation is None else 1} violations")
    return "\n".join(lines) + "\n"
