"""What the benchmarks share: rows, jobs, the reading of traces, limits, the record of the machine."""
