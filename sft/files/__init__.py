"""Reads, writes, copies and digests files safely: folders may be untrusted, and a process may end at any time."""
