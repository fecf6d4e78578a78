"""The report at the end of a run: what the hook did to each model, as data and as text for people."""

from typing import Any

from commhooks.handle import CommHook
from commhooks.report.rendering import as_text


def described(name: str, handle: CommHook) -> dict[str, Any]:
    """One model's part of the report: its handle's."""
    return {"model": name, **handle.report().to_dict()}


def text(report: dict[str, Any]) -> str:
    """The report in lines.

    Example:
        >>> print(text({"hook": "noop", "world_size": 2, "models": [], "notes": ["nothing was wrapped"]}))
        commhooks run: noop on 2 ranks
        note: nothing was wrapped
    """
    world = report["world_size"]
    lines = [f"commhooks run: {report['hook']} on {world} rank{'s' * (world != 1)}"]
    for model in report["models"]:
        lines += [model["model"], model["error"] if "error" in model else as_text(model)]
    return "\n".join([*lines, *(f"note: {note}" for note in report["notes"])])
