"""One rank of a pool that lives as long as the tests: calls what it is sent and says how it went."""

import gc
import os
import sys
import traceback
import warnings
from datetime import timedelta
from multiprocessing.connection import Client, Connection
from pathlib import Path

import cloudpickle
import torch

import samestep
from samestep.train.group import watch

TIMEOUT = timedelta(seconds=20)


def serve(line: Connection) -> None:
    """Call one function after another until the other side is gone."""
    warnings.simplefilter("error")
    # a busy machine may let a rank come late, which is not what the tests of remarks ask about
    watch.LEAST_S = TIMEOUT.total_seconds()
    world = samestep.init(backend=os.environ.get("SAMESTEP_TEST_BACKEND"), timeout=TIMEOUT)
    if os.environ.get("SAMESTEP_TEST_DEVICE", "cpu") != "cpu":
        torch.set_default_device(world.device)
    failure = None
    while True:
        line.send_bytes(cloudpickle.dumps(failure))
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


if __name__ == "__main__":
    # torch.compile looks a function's module up by its name, and a test's file may import another one.
    sys.path.extend(map(str, Path(__file__).parents[1:3]))
    with Client(sys.argv[1], family="AF_UNIX") as connection:
        connection.send(int(os.environ["RANK"]))
        serve(connection)
