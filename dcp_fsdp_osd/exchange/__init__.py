"""The exchange: bytes that several ranks want are read by one and broadcast to the others.

``decide`` whether it is worth it, find the ``regions`` that several ranks want, give each to a
reader in a ``schedule`` of ``rounds``; then the ``worker`` runs it, over the process groups of
``transport`` and within the memory of ``buffers``. All before the worker is pure.
"""
