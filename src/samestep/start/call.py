"""Runs in a worker of `launch`: reads the call from standard input, makes it, and writes the answer into that file."""

import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

import cloudpickle

from samestep.start.worker import end_with_parent

# The parent's sys.path comes first: samestep itself may only be found through it.
BOOT = (
    "import os, pickle, sys; call = os.fdopen(os.dup(0), 'r+b'); sys.path[:] = pickle.load(call);"
    "from samestep.start.call import main; main(call)"
)


def main(call: Any) -> None:
    """Make the call that is stored in this file, and replace it by the answer; after an exception exit with code 1."""
    # not between fork and exec: the launching notebook may have threads, so no code is safe there
    end_with_parent(os.getppid())
    text = call.read()
    call.seek(0)
    call.truncate()
    devnull = os.open(os.devnull, os.O_RDONLY)
    os.dup2(devnull, 0)
    os.close(devnull)
    try:
        answer, code = _call(text), 0
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:  # asyncio.CancelledError is no Exception
        while (trace := error.__traceback__) is not None and trace.tb_frame.f_code.co_filename == __file__:
            error.__traceback__ = trace.tb_next
        # the hook prints it and notes the failure, so this rank exits without waiting for the others
        sys.excepthook(type(error), error, error.__traceback__)
        answer, code = _dumped(error), 1
    call.write(answer)
    call.close()
    sys.exit(code)


def _call(text: bytes) -> bytes:
    function: Callable[..., Any]
    function, args, kwargs = cloudpickle.loads(text)
    value = function(*args, **kwargs)
    try:
        return bytes(cloudpickle.dumps(value))
    except Exception as error:
        raise TypeError(f"{type(value).__name__} cannot be returned from a worker: {error}") from error


def _dumped(error: BaseException) -> bytes:
    """The pickled exception and its text; only the text if the exception cannot be pickled and unpickled."""
    text = "".join(traceback.format_exception(error)).rstrip()
    for sent in (error, _Parts(error), None):
        try:
            data = bytes(cloudpickle.dumps((sent, text)))
            cloudpickle.loads(data)
        except Exception:
            continue
        return data
    raise AssertionError("a text can always be pickled")


class _Parts:
    """Pickles an exception by its attributes: its class may take other arguments than it stores."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __reduce__(self) -> Any:
        return _rebuilt, (type(self._error), self._error.args, vars(self._error))


def _rebuilt(kind: type[BaseException], args: tuple[Any, ...], attributes: dict[str, Any]) -> BaseException:
    error = kind.__new__(kind)
    error.args = args
    vars(error).update(attributes)
    return error
