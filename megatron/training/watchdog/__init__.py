"""One rank's failure ends the whole run soon, loudly and with its reason first.

A rank fails when it raises, when its process is gone (seen at once on the same host), when its heartbeat stops, or when
its main thread makes no progress. The first failure is written once, by the first rank to see it, into the run's store;
every other rank then writes the failing rank and its reason, then its own stacks, to stderr and
``<save>/stacks/rank-N.txt``, and leaves with exit code 1. docs/guides/failures.md says how fast it is seen,
and what is written where.

    progress        what the main thread is doing, and how long it may be silent
    failure_store   what the ranks tell each other: heartbeats, the first failure, answers to "where are you?"
    local_ranks     the processes of the other ranks on this host
    monitor         the thread that publishes, reads the failure store, judges and ends the process
    listener        the thread for what cannot wait for a round: SIGTERM, a death on this host, a store that is silent
    stacks          what is written at the end
    watchdog        the context around a run that puts these together

Everything in here ends a process by ``os._exit`` or a signal: a rank whose GPU is stuck in a collective of a dead peer
would wait forever in the destructors of an ordinary exit.
"""

from megatron.training.watchdog.watchdog import Watchdog

__all__ = ["Watchdog"]
