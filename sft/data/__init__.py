"""From rows of files to microbatches, by way of chats, the cache and packs."""
