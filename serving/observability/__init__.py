"""What can be seen of the server from outside: logs, metrics, traces, the audit log."""
