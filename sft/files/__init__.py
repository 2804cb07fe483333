"""Reads, writes, copies and digests files, so that neither a stranger's folder nor a crash does harm."""
