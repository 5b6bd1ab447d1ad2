"""Addresses at which processes of a test find each other."""

import socket


def free_address() -> str:
  """Returns an address of this machine at which nothing listens now."""
  with socket.socket() as free:
    free.bind(('localhost', 0))
    return f'localhost:{free.getsockname()[1]}'
