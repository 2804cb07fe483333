"""What a recipe will take of memory, by arithmetic."""
