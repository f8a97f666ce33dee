"""One rank of a pool that lives as long as the tests: calls what it is sent and says how it went."""

import gc
import sys
import traceback
import warnings
from datetime import timedelta
from multiprocessing.connection import Client

import cloudpickle

import samestep

TIMEOUT = timedelta(seconds=20)


def serve(address: str) -> None:
    """Call one function after another until the other side is gone."""
    warnings.simplefilter("error")
    with Client(address) as line:
        world = samestep.init(timeout=TIMEOUT)
        line.send_bytes(cloudpickle.dumps(world.rank))
        while True:
            try:
                function, arguments = cloudpickle.loads(line.recv_bytes())
            except EOFError:
                return
            failure = None
            try:
                function(world=world, **arguments)
            except BaseException:
                failure = traceback.format_exc()
            del function, arguments
            gc.collect()
            line.send_bytes(cloudpickle.dumps(failure))


if __name__ == "__main__":
    serve(sys.argv[1])
