"""The demo: a tiny vision-language model learns to measure drawn rectangles from a teacher."""
