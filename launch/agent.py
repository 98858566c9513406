"""torchrun whose exit status tells what the workers ended with.

torchrun ends with 1 whatever its workers ended with, and a signal makes it end with a traceback. A training run that is
told to stop saves a checkpoint and ends with 75 (start me again), and whoever started the recipe has to see that.
Arguments are torchrun's.
"""

import os
import signal
import sys

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main

if __name__ == "__main__":
    # the defaults leave out USR1 and give the workers 30 s: less than validation and a checkpoint may take
    os.environ.setdefault("PET_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1")
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "600")
    try:
        main()
    except ChildFailedError as error:
        # of the first that ended: the others got a SIGTERM then, and may call that being told to stop
        exitcode = error.get_first_failure()[1].exitcode
        sys.exit(exitcode if exitcode > 0 else 128 - exitcode)  # killed by a signal: as a shell says it
    except SignalException as error:
        # it went to the workers, and they have ended: the same command goes on from the last whole checkpoint
        asked_to_stop = error.sigval in (signal.SIGTERM, signal.SIGUSR1)
        sys.exit(os.EX_TEMPFAIL if asked_to_stop else 128 + error.sigval)
