"""The parts of `benchmarks/claim.py`: the server, each of its four measurements, and the report."""
