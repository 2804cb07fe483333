"""Where the weights of a run come from, and where they go: files of models, adapters, exports."""
