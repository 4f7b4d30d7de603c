"""Import Colossal-AI once, without the warnings of its import that do not matter here."""

from __future__ import annotations

import importlib.util
import logging
import warnings

import torch._inductor.config

warnings.filterwarnings("ignore", module=r"(colossalai|bitsandbytes|diffusers|transformers|torch)\.")
for name in ("bitsandbytes", "transformers"):
    logging.getLogger(name).setLevel(logging.ERROR)
# bitsandbytes calls torch.compile when it is imported, and torch 2.5 then starts processes that compile, in every rank.
# Nothing is compiled with Colossal-AI.
torch._inductor.config.compile_threads = 1

# In the main environment there is none to import.
if importlib.util.find_spec("colossalai"):
    import colossalai.booster  # noqa: F401
