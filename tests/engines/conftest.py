"""What holds in both engines' environments. Set before anything imports torch."""

import os

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "TQDM_DISABLE": "1",
    "OMP_NUM_THREADS": "1",  # a second thread would only wait for the first, on a busy machine for long
}
