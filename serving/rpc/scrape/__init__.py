"""What Prometheus reads: how the server stands, and the metrics of all workers in one place."""
