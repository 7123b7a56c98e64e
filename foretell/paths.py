"""Where foretell keeps what it fetched or built: one folder of the user's."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """`$FORETELL_CACHE`, else `foretell` under `$XDG_CACHE_HOME` or `~/.cache`; not created here."""
    own = os.environ.get("FORETELL_CACHE")
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared).expanduser() if shared else Path.home() / ".cache") / "foretell"
