"""What `python -m minikv.bench` is made of: participants in processes of their own, counts, the machine, summaries."""
