"""What docs/make_performance.py makes docs/performance.md, benchmarks/results/README.md and their plots of."""
