"""Files that a server needs beside weights: tokenizer, template, end tokens, and the flags to start it with."""
