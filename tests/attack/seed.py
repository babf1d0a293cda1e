"""What random attacks are drawn from. `make attack` counts ATTACK_SEED up from a fresh one, round by round."""

import os

SEED = int(os.environ.get("ATTACK_SEED", "0"))
