"""Plans that were measured before, on disk: the next process starts without measuring.

One JSON file per question. A file answers only the question that it holds word for word; one that is damaged, that
answers another question (an older version, another machine), or that names a plan which is no candidate any more is
ignored with one note. Files are replaced in one step, so that many processes may write at once.
"""

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

SCHEMA = "chitu.fast_cp.plan/1"
FOLDER_VARIABLE = "CHITU_CACHE_DIR"

_log = logging.getLogger(__name__)

# GPU, link, world, shapes, versions: everything that the fastest plan may depend on, as JSON knows it
Question = Mapping[str, Any]


def default_folder(environ: Mapping[str, str]) -> Path:
    """``CHITU_CACHE_DIR``, else the user's cache directory."""
    named = environ.get(FOLDER_VARIABLE)
    if named:
        return Path(named)
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "chitu" / "plans"


class PlanCache:
    """The plans in ``folder``; reading and writing never raise."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._own: dict[Path, Any] = {}  # what this process has measured, where nothing can be written too
        self._noted = False

    def find(self, question: Question, names: Collection[str]) -> dict[str, float] | None:
        """What was measured for ``question``: milliseconds by candidate, the one to use first; None where nothing is.

        ``names`` are the candidates of today.
        """
        path = self._path(question)
        try:
            kept = self._own[path] if path in self._own else json.loads(path.read_text())
            problem = _problem(kept, question, names)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            problem = f"it cannot be read ({error})"
        if problem:
            self._note(f"the kept plan {path} is ignored, and measured again: {problem}")
            return None
        measured: dict[str, float] = kept["measured_ms"]
        used = str(kept["used"])
        return {used: measured[used]} | measured

    def keep(self, question: Question, used: str, measured_ms: Mapping[str, float]) -> None:
        """Write the answer; a folder that cannot be written to is a note."""
        text = json.dumps({"schema": SCHEMA, "question": question, "used": used, "measured_ms": measured_ms}, indent=1)
        self._own[self._path(question)] = json.loads(text)
        temporary: Path | None = None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            descriptor, name = tempfile.mkstemp(dir=self.folder, prefix=".plan.")
            temporary = Path(name)
            with os.fdopen(descriptor, "w") as file:
                file.write(text + "\n")
            temporary.replace(self._path(question))
        except OSError as error:
            if temporary is not None:
                temporary.unlink(missing_ok=True)
            self._note(f"plans are not kept for later processes: {error}")

    def _path(self, question: Question) -> Path:
        digest = hashlib.sha256(json.dumps(question, sort_keys=True).encode()).hexdigest()
        return self.folder / f"{digest[:32]}.json"

    def _note(self, text: str) -> None:
        if not self._noted:
            self._noted = True
            _log.warning("%s", text)


def _problem(kept: Any, question: Question, names: Collection[str]) -> str | None:
    if not isinstance(kept, dict) or kept.get("schema") != SCHEMA:
        return "it has another format"
    if kept.get("question") != json.loads(json.dumps(question)):
        return "it answers another question"
    used, measured = kept.get("used"), kept.get("measured_ms")
    if not isinstance(used, str) or used not in names:
        return f"its plan {used!r} is no candidate any more"
    if not isinstance(measured, dict) or not all(isinstance(ms, int | float) for ms in measured.values()):
        return "its times are not numbers"
    return None if used in measured else f"it has no time for its plan {used!r}"
