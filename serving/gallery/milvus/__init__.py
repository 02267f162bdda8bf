"""Galleries on a Milvus server, for what one machine cannot hold."""
