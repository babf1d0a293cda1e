"""Imported last by the server from which tests fork processes: does once what each command would do again, which takes
a second. It starts no thread, because a fork has none of them."""

import gc

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from sparsellm.config import from_overrides

for _overrides in ([], ["experiment=smoke"], ["experiment=smoke", "data=files"]):
    from_overrides(_overrides)  # which keeps Hydra's results
get_checkpoint_conversion_mapping("llama")  # compiles a thousand regular expressions, once
gc.freeze()  # forks neither look for garbage in what is imported nor copy it
