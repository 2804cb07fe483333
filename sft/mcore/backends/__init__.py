"""The implementations of `backend.AttentionBackend`, their kernels, and the choice of one for a run."""
