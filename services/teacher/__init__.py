"""The teacher service: scores prompt groups over gRPC.

settings.py  what can be set            gate.py      what is admitted, refused, and why
server.py    bind, load, serve, drain   backlog.py   what waits for the engine
servicer.py  the gRPC methods           worker.py    the thread that owns the engine
batching.py  packing by tokens          engines/     what computes
scores.py    an outcome and its bytes   bounds.py    how much of a caller's text comes back
call.py      options and names          logs.py      bounded refusal log
"""
