"""What every part takes as an image unless its settings say otherwise."""

MAX_BYTES = 20 * 2**20
MAX_PIXELS = 2**22
# Longer to shorter side. Beyond, a processor that resizes the shorter side to a fixed length would
# unfold a few kilobytes into gigabytes.
MAX_ASPECT = 200
