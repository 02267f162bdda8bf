"""The gRPC face of the server; only this, the server around it and the client import grpc."""
