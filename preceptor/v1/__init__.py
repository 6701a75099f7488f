"""Stubs generated from proto/preceptor/v1 (make proto). Nothing here is written by hand."""
