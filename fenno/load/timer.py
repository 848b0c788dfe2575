"""A timer that fires on time, as a file descriptor (Linux timerfd): the timeouts of poll and of event loops round up to 1 ms."""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
import time

_ABSOLUTE = 1  # TFD_TIMER_ABSTIME


class Timer:
    """`fd` becomes readable at the time that was `set` last."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.fd: int = self._libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self.fd < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def set(self, when: float) -> None:
        """Fire at `when` on the monotonic clock; at once when that is past."""
        seconds, part = divmod(max(when, 1e-3), 1)
        self._libc.timerfd_settime(self.fd, _ABSOLUTE, struct.pack("@qqqq", 0, 0, int(seconds), int(part * 1e9)), None)

    def clear(self) -> None:
        """Take note that it fired."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.fd, 8)
