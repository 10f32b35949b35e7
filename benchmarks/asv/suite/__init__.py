"""The benchmarks that asv runs."""
