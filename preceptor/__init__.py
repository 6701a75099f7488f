"""Preceptor: teacher-as-a-service for on-policy distillation.

This package is the ground floor: the wire contract, the client, the queue, the settings. It needs
neither torch nor transformers.
"""
