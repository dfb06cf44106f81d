"""What docs/make_performance.py makes docs/performance.md, docs/measurements.md and their plots of."""
