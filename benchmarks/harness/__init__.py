"""Common parts of the benchmarks: rows, jobs, trace reading, limits, the record of the machine."""
