"""Inside a worker of `launch`: reads the call from its standard input, makes it, leaves the answer there."""

import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

import cloudpickle

from samestep.start.worker import end_with

# The parent's sys.path comes first, for samestep itself may be found there only.
BOOT = (
    "import os, pickle, sys; call = os.fdopen(os.dup(0), 'r+b'); sys.path[:] = pickle.load(call);"
    "from samestep.start.call import main; main(call)"
)


def main(call: Any) -> None:
    """Make the call that waits in this file, and replace it by its answer: with exit code 1 an exception."""
    # here, for a notebook has threads, and so has no safe moment between fork and exec
    end_with(os.getppid())
    text = call.read()
    call.seek(0)
    call.truncate()
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    try:
        answer, code = _call(text), 0
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:  # a cancelled task's is no Exception
        while (trace := error.__traceback__) is not None and trace.tb_frame.f_code.co_filename == __file__:
            error.__traceback__ = trace.tb_next
        # the hook prints it, and a rank whose failure it saw leaves without waiting for the others
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
    """The exception and its text; only the text where the exception does not survive the way."""
    text = "".join(traceback.format_exception(error)).rstrip()
    for sent in (error, _Parts(error), None):
        try:
            data = bytes(cloudpickle.dumps((sent, text)))
            cloudpickle.loads(data)
        except Exception:
            continue
        return data
    raise AssertionError("a text can be sent")


class _Parts:
    """An exception whose class takes other arguments than it keeps is sent by what it holds."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __reduce__(self) -> Any:
        return _rebuilt, (type(self._error), self._error.args, vars(self._error))


def _rebuilt(kind: type[BaseException], args: tuple[Any, ...], held: dict[str, Any]) -> BaseException:
    error = kind.__new__(kind)
    error.args = args
    vars(error).update(held)
    return error
