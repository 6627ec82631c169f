"""Watchdog: end the whole run quickly when one rank fails, and report the cause first.

A rank fails when it raises, when its process exits (detected at once on the same host), when its heartbeat stops, or
when its main thread makes no progress. The first rank that detects the failure writes it to the run's store, once.
Every other rank then writes the failing rank, the reason and its local stacks to stderr and
``<save>/stacks/rank-N.txt``, and exits with code 1. docs/guides/failures.md lists detection times and outputs.

    progress        phase of the main thread, and the maximum silence allowed in it
    failure_store   messages between ranks: heartbeats, the first failure, stack inquiries and answers
    local_ranks     processes of the other ranks on this host
    monitor         thread that publishes heartbeats, reads the store, judges other ranks and ends the process
    listener        thread for events between rounds: SIGTERM, a death on this host, a store that does not answer
    stacks          stack dumps, and what they reveal about the cause
    watchdog        context manager around a run that combines these modules

This package ends processes with ``os._exit`` or a signal only. In an ordinary exit, the destructors of a rank whose GPU
is blocked in a collective with a dead peer would wait forever."""

from megatron.training.watchdog.watchdog import Watchdog

__all__ = ["Watchdog"]
