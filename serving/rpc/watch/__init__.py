"""What can be seen of the server from outside: metrics and traces."""
