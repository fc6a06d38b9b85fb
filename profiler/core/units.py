"""Units. Capacities are binary (GiB), bandwidths decimal (GB/s); tables are microseconds, the clock nanoseconds."""

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
GB = 10**9
NS_PER_US = 1_000
NS_PER_MS = 1_000_000
NS_PER_S = 1_000_000_000
