"""The real package but for its __main__, which is found here first."""

from pathlib import Path

__path__.append(str(Path(__file__).parents[4] / "services"))
