"""Whether a training is checkpointed, and whether an existing checkpoint belongs to it."""

from __future__ import annotations

import itertools
import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from sparkdl.checkpoint.storage import OpenElsewhere
from sparkdl.errors import CheckpointError, ConfigError

SHOWN = 20
"""How many differences a message lists."""
SHOWN_CHARACTERS = 300
"""How many characters of one value it shows."""


class OtherTrainingError(ConfigError):
    """A checkpoint belongs to another training than the one that would resume from it."""


@dataclass(frozen=True, kw_only=True)
class CheckpointPolicy:
    """What the user asks of checkpoints.

    Attributes:
        path: the directory; see ``storage.CheckpointStore``.
        every_epochs: epochs between two checkpoints.
        every_rounds: rounds between two, besides those at the ends of epochs; None for no others.
        keep_last: how many to keep.
        resume: ``auto`` resumes from the newest checkpoint if there is one; ``never`` starts over;
            ``own`` resumes from the newest one if this very training has written it.
        open_elsewhere: see ``storage.CheckpointStore``.
        application: what the driver belongs to, shown to whoever is refused the directory.
        training: identifies the training in its checkpoints, unless it resumes another.
    """

    path: str
    every_epochs: int = 1
    every_rounds: int | None = None
    keep_last: int = 2
    resume: Literal["auto", "never", "own"] = "auto"
    open_elsewhere: OpenElsewhere | None = None
    application: str | None = None
    training: str = field(default_factory=lambda: uuid.uuid4().hex, repr=False, compare=False)


def require_same(directory: str, saved: Mapping[str, Any], present: Mapping[str, Any]) -> None:
    """Check that a checkpoint belongs to the training that would resume from it.

    Args:
        directory: where the checkpoint is.
        saved: what the training was when the checkpoint was written; JSON.
        present: what it is now; JSON.

    Raises:
        OtherTrainingError: they differ; the message has one line per difference.
        CheckpointError: the checkpoint does not say which training it belongs to.
    """
    unknown = [key for key in present if key not in saved]
    if unknown:
        raise ConfigError(
            f"{directory} was written by an earlier version of sparkdl-torch, which did not "
            f"record {', '.join(unknown)}: whether it belongs to this training is unknown. Let "
            "that version finish it, use another checkpointPath, or start over with resume='never'"
        )
    try:
        found = list(differences(saved, present))
    except (AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{directory} does not say what training it belongs to: {error!r}"
        ) from error
    refuse(directory, found)


def refuse(directory: str, found: Sequence[str], advice: str = "") -> None:
    """Refuse a checkpoint if it belongs to another training.

    Args:
        directory: where the checkpoint is.
        found: the differences, one line each; without any the checkpoint is not refused.
        advice: other possible reasons, in one or more sentences.

    Raises:
        OtherTrainingError: there is a difference.
    """
    if not found:
        return
    lines = "".join(f"\n  {line}" for line in found[:SHOWN])
    if len(found) > SHOWN:
        lines += f"\n  and {len(found) - SHOWN} more"
    raise OtherTrainingError(
        f"{directory} is a checkpoint of a different training:{lines}\nTrain as before to resume "
        "it or to get its model back. For a separate training use another checkpointPath, or "
        f"start over in this one with resume='never'.{advice and f' {advice}'}"
    )


def differences(saved: Mapping[str, Any], present: Mapping[str, Any]) -> Iterator[str]:
    """How two descriptions differ, one line per difference.

    Args:
        saved: settings by name: JSON, or objects as described by ``identity.describe``.
        present: the present settings, with the same names.
    """
    for key in present:
        before, now = saved[key], present[key]
        if isinstance(before, dict) and isinstance(now, dict) and "parts" in now:
            yield from _object_difference(key, before, now)
        elif isinstance(before, dict) and isinstance(now, dict):
            for name in {**now, **before}:
                yield from difference(name, before.get(name), now.get(name))
        else:
            yield from difference(key, before, now)


def difference(name: str, before: Any, now: Any) -> Iterator[str]:
    """Yield a line that says how two values differ, unless they are the same.

    Args:
        name: what the values are.
        before: JSON.
        now: the present value, as JSON or something that becomes it.
    """
    # As text, because NaN differs from itself and JSON turns tuples into lists.
    if json.dumps(before) != json.dumps(now):
        yield f"{name}: was {_shown(before)}, is now {_shown(now)}"


def _object_difference(
    key: str, before: Mapping[str, Any], now: Mapping[str, Any]
) -> Iterator[str]:
    same_text = before["is"] == now["is"]
    same = before["parts"] == now["parts"]
    if before["python"] != now["python"]:
        same = same_text
    if same:
        return
    if not same_text:
        yield f"{key}: was {_unlike(before['is'], now['is'])}"
        return
    names = before["parts"].keys() | now["parts"].keys()
    changed = sorted(k for k in names if before["parts"].get(k) != now["parts"].get(k))
    what = _shown(", ".join(changed))
    yield f"{key}: {_shown(now['is'])} differs in its {what}"


def _unlike(before: str, now: str) -> str:
    """The first lines where two texts differ."""
    pairs = itertools.zip_longest(before.splitlines(), now.splitlines(), fillvalue="nothing")
    first = next((pair for pair in pairs if pair[0] != pair[1]), (before, now))
    was, now = (_shown(line.strip().removesuffix("(")) for line in first)
    return f"{was}, is now {now}"


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    text = "none" if value is None else " ".join(text.split())
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."
