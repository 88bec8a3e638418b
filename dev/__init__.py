"""The local stack: databases, a Pub/Sub stand-in, functions, scheduler. Not deployed."""

import os

# Starting child processes is our trade here, and gRPC comments on each of them.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
