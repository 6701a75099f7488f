"""`preceptor up`: every part of a run on this machine, watched, restarted, and ended together."""
