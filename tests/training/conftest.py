import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # small_run.py is a script too: torchrun starts it
