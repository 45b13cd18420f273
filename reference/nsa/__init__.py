"""NSA: what each branch gives, and its gradients."""
