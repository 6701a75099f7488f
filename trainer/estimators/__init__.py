"""From the teacher's marks and verifiable rewards to advantages; estimate.py is the entry."""
