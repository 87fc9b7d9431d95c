"""The process that compiles grammars: it can be killed, which a thread inside of native code cannot.

Run as a script by `core.grammar.compiler`, with its own process id as argument, so it imports nothing of ours. Over its
standard streams go pickles, each with its length in front: first the vocabulary, then one request and one answer at a
time.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import resource
import signal
import struct
import sys
from typing import IO, Any

MEMORY_BYTES = 4 << 30
"""What compiling may take on top of what the process has; more is one grammar's own fault, as an error."""
GRACE_SECONDS = 5
"""Beyond a request's time, in case whoever would kill the process cannot."""
_PR_SET_PDEATHSIG = 1  # of linux/prctl.h


def main() -> None:
    """Answer requests until the other end closes."""
    end_with(int(sys.argv[1]))
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    vocabulary, stop_token_ids = receive(source)
    import xgrammar

    info = xgrammar.TokenizerInfo(vocabulary, vocab_size=len(vocabulary), stop_token_ids=stop_token_ids)
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    with open("/proc/self/statm") as statm:
        used = int(statm.read().split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (used + MEMORY_BYTES, resource.RLIM_INFINITY))
    send(sink, ("ready", ""))
    while True:
        try:
            kind, text, seconds = receive(source)
        except EOFError:
            return
        signal.alarm(int(seconds) + GRACE_SECONDS)
        try:
            compiled = compiler.compile_regex(text) if kind == "regex" else compiler.compile_grammar(text)
            answer = "compiled", compiled.serialize_json()
        except Exception as error:  # the library raises many kinds for a grammar that is wrong
            answer = "error", str(error)
        signal.alarm(0)
        send(sink, answer)


def end_with(parent: int) -> None:
    """Die when the parent process does: a closed pipe is not seen while compiling, nor while a fork of it lives."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was gone before
        sys.exit()


def send(sink: IO[bytes], value: Any) -> None:
    """Write one message."""
    data = pickle.dumps(value)
    sink.write(struct.pack("<Q", len(data)) + data)
    sink.flush()


def receive(source: IO[bytes]) -> Any:
    """Read one message.

    Raises:
        EOFError: the other end is closed.
    """
    head = source.read(8)
    data = source.read(struct.unpack("<Q", head)[0]) if len(head) == 8 else b""
    if not data:
        raise EOFError
    return pickle.loads(data)


if __name__ == "__main__":
    main()
