"""The models, their precision, and where their FP8 comes from."""

import logging
from functools import partial


def _is_not(beginning: str, record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(beginning)


# transformers imports torchao wherever it is installed, and torchao then warns of each of its CUDA libraries that the
# machine cannot load (float8 training uses none of them), and torch of how torchao registers two enums.
logging.getLogger("torchao").addFilter(partial(_is_not, "Failed to load"))
logging.getLogger("torch.utils._pytree").addFilter(partial(_is_not, "<enum "))
