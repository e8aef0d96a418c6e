"""Peers of the benchmark `resume_peers`: each a script that indexes the same chunks its own way.

A script is called as `PEER.py TEXTS DATABASE EMBEDDINGS STATE`: a JSON file of chunks, the parts of
a database address as JSON, the base URL of an embedding service, and a folder that survives kills.
It ends with 0 when all is indexed. Killed and called again, it goes on as that system does.
"""
