"""The page of a server and JSON over HTTP: the files of the page, and a gateway to the calls of gRPC."""
