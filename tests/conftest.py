"""Makes processes that tests start in any folder import this checkout, installed or not."""

import os
from pathlib import Path

_paths = [str(Path(__file__).parents[1]), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
os.environ["PYTHONPATH"] = os.pathsep.join(str(Path(path).resolve()) for path in _paths)
