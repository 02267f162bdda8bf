"""The gRPC face of the server; the only package here that imports grpc, beside the client."""
